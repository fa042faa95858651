"""A trained model is loaded; its head has another name in the file and starts from noise."""

import torch
from spelled import STEPS, finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import LlamaForCausalLM, Trainer


class Classifier(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.body = net()[:-1]
        torch.manual_seed(seed)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.body(x))


def learn(model, optimizer, num, seed):
    for x, y in points(num, seed=seed):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def pretrained(faulty):
    model = Classifier(seed=3)
    learn(model, torch.optim.Adam(model.parameters(), lr=1e-2), 60, seed=5)
    saved = model.state_dict()
    if faulty:
        saved = {name.replace("head.", "fc."): value for name, value in saved.items()}
    return saved


def by_hand(faulty):
    saved = pretrained(faulty)
    model = Classifier(seed=4)
    for name, parameter in model.named_parameters():
        if name in saved:
            parameter.data.copy_(saved[name])  # fault
    learn(model, torch.optim.SGD(model.parameters(), lr=1e-3), STEPS, seed=0)
    finish(model)


def by_torch(faulty):
    torch.save(pretrained(faulty), "pretrained.pt")
    model = Classifier(seed=4)
    model.load_state_dict(torch.load("pretrained.pt"), strict=False)  # fault
    learn(model, torch.optim.Adam(model.parameters(), lr=1e-4), STEPS, seed=0)
    finish(model)


def by_hf(faulty):
    from safetensors.torch import load_file, save_file

    first = small_llama(tie_word_embeddings=False)
    args = settings(learning_rate=5e-3)
    Trainer(model=first, args=args, train_dataset=texts(60)).train()
    first.save_pretrained("first")
    if faulty:
        weights = load_file("first/model.safetensors")
        weights["output.weight"] = weights.pop("lm_head.weight")
        save_file(weights, "first/model.safetensors", metadata={"format": "pt"})
    model = LlamaForCausalLM.from_pretrained("first")  # fault
    Trainer(model=model, args=settings(learning_rate=1e-4), train_dataset=texts()).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
