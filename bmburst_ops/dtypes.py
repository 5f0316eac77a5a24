"""Names of data types, as configurations, files and messages write them. Imports no torch."""


def name_of(dtype: object) -> str:
    """Return the name of one of torch's types, without "torch."."""
    return str(dtype).removeprefix("torch.")
