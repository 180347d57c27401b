"""Pure planning: integers, shapes and dtypes in, frozen values out."""
