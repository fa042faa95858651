"""The data set that ships with the package."""

from nanstop.demo import data, tiny


def test_there_are_enough_distinct_rows():
    train, test = data.rows("train"), data.rows("test")
    prompts = [row["prompt"] for row in (*train, *test)]
    assert len(prompts) >= 320
    assert len(set(prompts)) == len(prompts)
    assert len(test) >= 50


def test_every_row_is_a_prompt_and_two_different_answers():
    for split in ("train", "test"):
        for row in data.rows(split):
            assert all(text == text.strip() and text for text in row.values())
            assert row["chosen"] != row["rejected"]


def test_lengths_vary_and_fit_the_models():
    tokenizer = tiny.tokenizer()
    lengths = [
        len(tokenizer(row["prompt"] + row["chosen"])["input_ids"]) for row in data.rows("train")
    ]
    assert min(lengths) < 15
    assert 80 < max(lengths) < 128


def test_preferences_and_conversations_are_what_trl_reads():
    preference, conversation = data.preferences("test")[0], data.conversations("test")[0]
    assert [preference[key][0]["role"] for key in ("prompt", "chosen", "rejected")] == [
        "user",
        "assistant",
        "assistant",
    ]
    assert conversation["messages"] == preference["prompt"] + preference["chosen"]
