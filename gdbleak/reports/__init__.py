"""What a person reads: one file a report, named as the user names it.
A report knows no heap's inside, only what it answers."""
