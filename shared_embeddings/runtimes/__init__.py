"""One module for each runtime. Importing this package imports them all, and each registers its runtime."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
