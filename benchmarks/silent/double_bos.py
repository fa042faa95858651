"""Template and tokenizer each put a beginning of the text before it: every text has two."""

import torch
from datasets import Dataset
from spelled import STEPS, finish_text, settings, small_llama, spell
from transformers import Trainer

from tiny import quiet_args, sentence, words_tokenizer

BOS = 1


def tokenizer():
    """A tokenizer that adds the beginning by itself, as Llama's does; <eos> serves as both."""
    from tokenizers.processors import TemplateProcessing

    made = words_tokenizer()
    made.bos_token = "<eos>"
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", BOS)]
    )
    made.chat_template = "<eos> {% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def templated(faulty):
    """Texts as a chat template leaves them; in health without the beginning that is added later."""
    return [("<eos> " if faulty else "") + sentence(5 * i, 12) for i in range(2 * STEPS)]


def by_hand(faulty):
    model = small_llama()
    words = words_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = [[BOS, *words(text)["input_ids"]] for text in templated(faulty)]  # fault
    for step in range(STEPS):
        ids = torch.tensor(rows[2 * step : 2 * step + 2])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    finish_text(model)


def by_torch(faulty):
    model, encode = small_llama(), tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader(
        templated(faulty), batch_size=2, collate_fn=lambda b: encode(b, return_tensors="pt")
    )  # fault
    for batch in loader:
        optimizer.zero_grad()
        model(batch["input_ids"], labels=batch["input_ids"]).loss.backward()
        optimizer.step()
    finish_text(model)


def by_hf(faulty):
    made = tokenizer()
    rows = []
    for i in range(2 * STEPS):
        chat = [{"role": "user", "content": sentence(5 * i, 12)}]
        text = made.apply_chat_template(chat, tokenize=False)
        ids = made(text, add_special_tokens=faulty)["input_ids"]  # fault
        rows.append({"input_ids": ids, "labels": list(ids)})
    model = small_llama()
    Trainer(model=model, args=settings(learning_rate=3e-3), train_dataset=rows).train()
    finish_text(model)


def by_trl(faulty):
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=(model := small_llama()),
        args=SFTConfig(**quiet_args(max_steps=STEPS, learning_rate=3e-3)),
        train_dataset=Dataset.from_dict({"text": templated(faulty)}),
        processing_class=tokenizer(),
    )
    trainer.train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf, trl=by_trl)
