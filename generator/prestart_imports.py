"""Imported by the fork server of ``generator.prestart``, and by nobody else: what engine cores will need."""

from generator.prestart import CORE_MODULES, import_ahead

import_ahead(CORE_MODULES)
