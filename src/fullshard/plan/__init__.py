"""Pure planning: integers, shapes and dtypes in, frozen values out; no device, no process group."""
