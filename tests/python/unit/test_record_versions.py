"""tests/record_versions.py: what a green run leaves in docs/torch_versions.md."""

import pytest

import record_versions

TABLE = """| torch | Python | on | commit | C++ tests | Python tests |
|---|---|---|---|---|---|
| 2.9.1 | 3.11 | 2026-01-02 | 0a | 3 passed | 4 passed |
| 2.11.0 | 3.11 | 2026-01-02 | 0a | 3 passed | 4 passed |

After it.

| from | what |
|---|---|
| 2.13 | of another table |
"""
AFTER = TABLE.splitlines()[4:]
GTEST = """<testsuites><testsuite name="shard">
<testcase name="a" status="run"/><testcase name="b" status="run"/>
<testcase name="c" status="notrun"/>
</testsuite></testsuites>"""
PYTEST = """<testsuites><testsuite name="pytest">
<testcase name="a"/><testcase name="b"><skipped/></testcase>{more}
</testsuite></testsuites>"""


@pytest.fixture
def passed(tmp_path, monkeypatch):
    monkeypatch.setattr(record_versions, "TABLE", tmp_path / "torch_versions.md")
    monkeypatch.setattr(record_versions, "commit", lambda: "1b")
    record_versions.TABLE.write_text(TABLE)
    (tmp_path / "shard_test.xml").write_text(GTEST)
    (tmp_path / "python.xml").write_text(PYTEST.format(more=""))
    return tmp_path


def test_last_run_of_a_version_is_its_line(passed, monkeypatch):
    for version in ("2.15.0+cu132", "2.11.1+cpu"):
        monkeypatch.setattr("torch.__version__", version)
        record_versions.main(passed)
    heading, _, *lines = record_versions.TABLE.read_text().splitlines()
    rows = lines[: -len(AFTER)]
    assert [heading, *lines[-len(AFTER) :]] == [TABLE.splitlines()[0], *AFTER]
    assert [row.split(" | ")[0] for row in rows] == [
        *("| 2.9.1", "| 2.11.1+cpu", "| 2.15.0+cu132")
    ]
    assert all(
        row.endswith(" | 1b | 2 passed, 1 skipped | 1 passed, 1 skipped |")
        for row in rows[1:]
    )


def test_the_page_has_the_table_that_is_written():
    page = record_versions.TABLE.read_text()
    line = "| 2.11.0 | 3.11 | 2026-01-02 | 0a | 3 passed | 4 passed |"
    assert line in record_versions.with_line(page, line).splitlines()


@pytest.mark.parametrize("bad", ["failure", "error"])
def test_a_failure_is_refused(passed, bad):
    more = f'<testcase name="c"><{bad}/></testcase>'
    (passed / "python.xml").write_text(PYTEST.format(more=more))
    with pytest.raises(SystemExit, match="expected a run without failures, got one in"):
        record_versions.main(passed)
    assert record_versions.TABLE.read_text() == TABLE


def test_commit_says_whether_what_was_tested_differs_from_it(tmp_path, monkeypatch):
    monkeypatch.setattr(record_versions, "ROOT", tmp_path)
    assert record_versions.commit() == ""
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    record_versions.git("init", "--quiet")
    record_versions.git(*author, "commit", "--quiet", "--allow-empty", "--message=a")
    name = record_versions.commit()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").touch()
    assert name and record_versions.commit() == name
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "new.py").touch()
    assert record_versions.commit() == f"after {name}"


def test_no_tests_are_no_green_run(passed):
    (passed / "shard_test.xml").unlink()
    with pytest.raises(SystemExit, match="expected the tests that were run, got none"):
        record_versions.main(passed)
