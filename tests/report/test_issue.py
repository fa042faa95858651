"""An incident as Markdown that can be posted: what is kept, and what never gets out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanstop.records import Environment, Signal, SourceLine
from nanstop.report.text.issue import issue, redacted
from report.specimens import AT, DIAGNOSIS, EVENT, INCIDENT, LOCALIZATION, REPORT

NAMES = st.text("abcdefghijklmnopqrstuvwxyzABC-_0189", min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("frame /home/bob/p/train.py:36 in mm", "frame <path>/train.py:36 in mm"),
        (r"C:\\Users\\Bob Smith\\code\\x.py:3", "<path>/x.py:3"),
        ("~/of bob/b.py", "<path>/b.py"),
        ("read /home/bob", "read <path>"),
        (
            "/x/lib/python3.11/site-packages/transformers/qwen2.py:46",
            "transformers/qwen2.py:46",
        ),
        ("see https://internal.corp/x", "see <path>"),
        ("s3://bucket/private/rows", "<path>"),
        ("postgres://u:p@host/db", "postgres://<secret>host/db"),
        ("token=hf_abcdefghijk123", "token=<secret>"),
        ("with hf_abcdefghijk123 in it", "with <secret> in it"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer <secret>"),
        ("WANDB_API_KEY: 12ab", "WANDB_API_KEY: <secret>"),
        ("0123456789abcdef0123456789abcdef01234567", "<secret>"),
        ("bob@example.com wrote", "<secret> wrote"),
        ("f(x, 'John is ill') / n", "f(x, <text>) / n"),
        ('prompt = "John is ill"', "prompt = <text>"),
    ],
)
def test_secrets_folders_and_strings_are_taken_out(text, kept):
    assert redacted(text) == kept


@pytest.mark.parametrize(
    "text",
    [
        "keep `base_model.model.layers.1.norm` in float32",
        "[proven: passes 4/4, removing it fails 4/4; loss within 2e-7 of float32]",
        "AdamW's eps 1e-08 rounds to 0 in float16: the update is m / (sqrt(v) + 0)",
        "sample 0 tokens 0-66; sample 1 token 5",
        "return output.type_as(x) @ w / n",
        "exceeds float16 (https://github.com/huggingface/transformers/issues/39972)",
        "clip_ratio/low_mean of the optimizer's steps",
    ],
)
def test_what_tells_of_the_failure_stays(text):
    assert redacted(text) == text


@given(user=NAMES, secret=NAMES, windows=st.booleans())
def test_no_folder_and_no_secret_gets_out(user, secret, windows):
    user, secret = f"user-{user}", f"s3cr3t{secret}"
    folder = rf"C:\Users\{user}\runs\train.py" if windows else f"/home/{user}/runs/train.py"
    line = SourceLine(file=folder, line=3, function="f", text=f"f('{secret}', api_key={secret})")
    diagnosis = replace(DIAGNOSIS, lines=(f"at {folder}:3 f", f"password: {secret}"))
    report = replace(
        REPORT,
        incident=replace(
            INCIDENT,
            signals=(Signal(source="exception", message=secret, at=AT),),
            environment=Environment(
                nanstop="0", python="3", env_vars=(("A", secret),), packages=(("b", folder),)
            ),
        ),
        localization=replace(LOCALIZATION, first_bad=replace(EVENT, source=line)),
        diagnoses=(diagnosis,),
    )
    shown = issue(report)
    assert user not in shown
    assert secret not in shown
    assert "error[NS201]" in shown


def test_an_issue_tells_what_happened_and_on_which_versions():
    shown = issue(REPORT)
    assert shown.startswith("## error\\[NS201\\]: float16 overflow in \\`\\_to\\_copy\\`, forward")
    assert "proven: with it 3 of 3 runs pass, without it 3 of 3 fail" in shown
    assert "| python | 3.11.2 |" in shown
    assert "| autocast | float16 |" in shown
    facts = replace(INCIDENT.facts, peft="LORA", gradient_checkpointing=True, world_size=2)
    shown = issue(replace(REPORT, incident=replace(INCIDENT, facts=facts)))
    assert "| adapter | LORA |" in shown
    assert "| activations | computed again |" in shown
    assert "| processes | 2 |" in shown


def test_no_text_ends_the_box_that_it_stands_in():
    report = replace(REPORT, diagnoses=(replace(DIAGNOSIS, cause="```\n# not a heading"),))
    fence = issue(report).split("\n")[2]
    assert fence == "````"
    assert issue(report).count(fence) == 2
