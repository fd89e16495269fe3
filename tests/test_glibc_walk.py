"""The walk of a heap that is damaged in many places:
each costs what is near it, not what is between the first and the last."""
import shutil

from gdbleak.heaps import glibc
from gdbleak.target.core_file import open_core


def test_many_damaged_chunks(captured, tmp_path):
    core = tmp_path / "core"
    shutil.copy(captured("heaps", "foreign_sbrk").core, core)
    sound = glibc.find(open_core(str(core)))[0]
    chosen = sound.blocks.address[len(sound.blocks) // 10::len(sound.blocks) // 10][:8].tolist()
    target = open_core(str(core))
    places = [target.space.find(user - 8)[0] for user in chosen]     # the core is mapped from the buffer's beginning
    with open(core, "r+b") as stream:
        for place, head in zip(places, (0, 0xffffffffffffffff, 0x41, 0x1234567, 8, 1 << 40, 0x13, 0)):
            stream.seek(place)
            stream.write(head.to_bytes(8, "little"))
    damaged = glibc.find(open_core(str(core)))[0]
    assert len(damaged.blocks) > len(sound.blocks) - 8 * 8
    named = {damage.address for damage in damaged.damage}
    # 0x41 can lead to a chunk
    assert sum(any(user - 16 <= address <= user + 512 for address in named) for user in chosen) >= 7
    known = set(sound.blocks.address.tolist())
    assert sum(user not in known for user in damaged.blocks.address.tolist()) <= 8
