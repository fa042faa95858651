"""Speech recognition by CTC: an LSTM over frames and transcripts of unequal lengths."""

import torch
from record import Record
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.manual_seed(101)
record = Record()
lstm, head = nn.LSTM(6, 24, bidirectional=True, batch_first=True), nn.Linear(48, 8)
criterion = nn.CTCLoss(blank=0, zero_infinity=True)
optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=5e-3)
sounds = torch.randn(8, 6)


def spoken():
    target_lengths = torch.randint(2, 6, (8,))
    targets = torch.randint(1, 8, (8, 5))
    lengths = target_lengths * 4 + torch.randint(0, 3, (8,))
    frames = torch.zeros(8, int(lengths.max()), 6)
    for row in range(8):
        said = targets[row, : target_lengths[row]].repeat_interleave(4)
        frames[row, : len(said)] = sounds[said]
    return frames + 0.1 * torch.randn_like(frames), lengths, targets, target_lengths


for step in range(30):
    frames, lengths, targets, target_lengths = spoken()
    packed = pack_padded_sequence(frames, lengths, batch_first=True, enforce_sorted=False)
    hidden, _ = pad_packed_sequence(lstm(packed)[0], batch_first=True)
    log_probs = head(hidden).log_softmax(-1).transpose(0, 1)
    loss = criterion(log_probs, targets, lengths, target_lengths)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([*lstm.parameters(), *head.parameters()], 5.0)
    optimizer.step()
    record(step, lstm, head, loss=loss.item())
with torch.no_grad():
    record.end(log_probs, loss=loss)
