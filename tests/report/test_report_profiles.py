"""Files of `outblas profile` that are wrong: the error names the file's entry and the field."""

from pathlib import Path

import pytest
from support.reports import Entry, counted, write

from outblas.report import profiles

LOAD = {"space": "shared", "operation": "load"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"occupancy": 18.0}, r"occupancy is 18.0, expected a number from 0 to 1.1"),
        ({"ipc": "fast"}, r"ipc is 'fast'"),
        ({"not_selected_share": -1}, r"not_selected_share is -1"),
        ({"shared": {"ld": 3}}, r"shared.ld is 3, expected an object"),
        ({"shared": {"st": {"excess": 2}}}, r"shared.st.excess is 2"),
        ({"memory": {}}, r"memory is \{\}, expected a list"),
        ({"memory": [{"requests": "many"}]}, r"memory\[0\].requests is 'many'"),
        ({"memory": [{"space": "shared"}]}, r"memory\[0\].operation is None"),
        ({"memory": [LOAD | {"operand": 3}]}, r"memory\[0\].operand is 3"),
        ({"memory": [LOAD | {"ideal": -1}]}, r"memory\[0\].ideal is -1"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.replace("\\", ""),
)
def test_malformed_profiles_name_the_field(changes: Entry, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "ncu.json", counted("simt.naive", **changes))

    with pytest.raises(ValueError, match=rf"results\[0\].{message}"):
        profiles.load([path])
