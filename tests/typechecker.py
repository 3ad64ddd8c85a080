"""beartype as the tests use it: an int is a float (PEP 484), as in Python."""

import beartype

check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
