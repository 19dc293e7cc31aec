"""Imported by the fork server of ``generator.prestart``, and by nobody else: what engine cores will need."""

import gc
import importlib

from generator.prestart import CORE_MODULES, quick_imports

with quick_imports():
    for name in CORE_MODULES:
        importlib.import_module(name)
# The modules stay for good; a collection in the core would only copy their pages.
gc.freeze()
