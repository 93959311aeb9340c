"""The compiler's passes: one file, one pure public function each; only the driver knows their order."""
