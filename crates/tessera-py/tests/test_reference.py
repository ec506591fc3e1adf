"""The reference page is that of the stubs, and names only tests that exist."""

import tessera
from reference import GUIDE, MODULES, PACKAGE, PAGE, render


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text() == render(), "run `python crates/tessera-py/tests/reference.py`"


def test_every_name_of_the_stubs_exists() -> None:
    for module in MODULES:
        names = getattr(tessera, module)
        for name in names.__all__:
            assert getattr(names, name).__doc__, f"{module}.{name} has no documentation"


def test_the_tests_of_the_guide_exist() -> None:
    for _, _, _, test in GUIDE:
        if test:
            file, name = test.split("::")
            assert f"def {name}(" in (PACKAGE / "tests" / file).read_text(), test
