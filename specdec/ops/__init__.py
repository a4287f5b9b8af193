"""Operations that the device decides: one documented function or class each, dispatched once and outside the step."""
