LOCAL_ONLY: dict[str, str] = {}
