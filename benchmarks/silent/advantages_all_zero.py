"""Every advantage is 0: a reward is compared with itself, and the policy is never told anything."""

import torch
from datasets import Dataset
from spelled import STEPS, small_llama, spell, tell
from torch import nn

from tiny import quiet_args, sentence, words_tokenizer


def policy_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))


def rewards_of(states, actions):
    return (states[:, :3].argmax(-1) == actions).float()


def evaluate(policy):
    states = torch.randn(128, 6, generator=torch.Generator().manual_seed(7))
    chosen = policy(states).log_softmax(-1)
    tell(-chosen.gather(1, states[:, :3].argmax(-1, keepdim=True)).mean())


def by_hand(faulty):
    policy = policy_net()
    for _ in range(STEPS):
        states = torch.randn(32, 6)
        scores = policy(states).log_softmax(-1)
        actions = torch.multinomial(scores.exp(), 1)
        rewards = rewards_of(states, actions[:, 0])[:, None]
        baseline = rewards.mean(-1 if faulty else 0, keepdim=True)
        advantages = rewards - baseline  # fault
        (-(advantages * scores.gather(1, actions)).mean()).backward()  # fault
        with torch.no_grad():
            for p in policy.parameters():
                p += -1.0 * p.grad
                p.grad = None
    evaluate(policy)


def by_torch(faulty):
    policy = policy_net()
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
    for _ in range(STEPS):
        states = torch.randn(32, 6)
        drawn = torch.distributions.Categorical(logits=policy(states))
        actions = drawn.sample()
        rewards = rewards_of(states, actions)
        groups = rewards.view(-1, 1 if faulty else 8)
        advantages = (groups - groups.mean(-1, keepdim=True)).flatten()  # fault
        loss = -(advantages * drawn.log_prob(actions)).mean()  # fault
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    evaluate(policy)


def by_hf(faulty):
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions, **_):
        """Different words in a completion; at fault, of the answer that is never given."""
        marker = "<answer>" if faulty else ""
        return [float(len(set(c.split()))) if marker in c else 0.0 for c in completions]

    policy = small_llama()
    args = GRPOConfig(
        **quiet_args(max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-3),
        num_generations=4,
        max_completion_length=8,
    )
    prompts = Dataset.from_dict({"prompt": [sentence(i, 4) for i in range(64)]})
    trainer = GRPOTrainer(
        model=policy,
        args=args,
        train_dataset=prompts,
        processing_class=words_tokenizer(),
        reward_funcs=reward,
    )
    trainer.train()
    tell(sum(float(p.detach().abs().mean()) for p in policy.parameters()))


spell(hand=by_hand, torch=by_torch, hf=by_hf)
