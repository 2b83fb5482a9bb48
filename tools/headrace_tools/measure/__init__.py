"""How far one container's predictions are from another's."""
