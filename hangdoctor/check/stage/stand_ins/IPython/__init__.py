"""Import-only: SGLang's frontend language shows things in notebooks."""  # noqa: N999 (its real name)
