"""The process under the glass: its memory, mappings, modules, threads and symbols, whatever they were taken from."""
