"""One file per embedding method: options, module, registration. Every file here is found by itself."""
