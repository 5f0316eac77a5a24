"""Imported last by the server of ranks: what each rank would do at first, and pay for, with what the server imported.

Matplotlib reads its fonts when it first draws. Python's collector visits all objects, and copies their pages, at each
whole collection, as a trainer begins with one; of what was there before it does not. AdamW in host memory compiles its
kernel. Each is some tenths of a second of processor time.
"""

import gc
import io

from bmburst.outputs import blank_picture
from bmburst_ops import host_adamw

_picture = blank_picture(1, 1)
_picture.subplots()
_picture.savefig(io.BytesIO())
del _picture
host_adamw._compiled()
gc.collect()
gc.freeze()
