"""A function for `neobert add-attributes`."""


def words(record):
    return {"words": len(record.text.split())}
