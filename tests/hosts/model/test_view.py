"""What structure alone tells of a model."""

import pytest
import torch
import transformers
from torch import nn

import tiny
from nanstop.hosts.loop.facts import facts_of_loop
from nanstop.hosts.model.view import PlainView
from nanstop.numerics.modules import quantized_layers, repeated_blocks, tied_groups


class Plain(nn.Module):
    """A decoder written by hand, its head tied to its embedding."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(8, 4)
        self.words = nn.Embedding(16, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.pool = nn.Linear(4, 4)
        self.out = nn.Linear(4, 16, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids):
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(self.pool(hidden))


@pytest.fixture(scope="module")
def llama():
    return tiny.llama(tie_word_embeddings=True)


def test_a_plain_module():
    view = PlainView(Plain())
    assert repeated_blocks(view.root) == ("blocks.0", "blocks.1", "blocks.2")
    assert (view.head(), view.embedding()) == ("out", "words")
    assert tied_groups(view.root) == (("words.weight", "out.weight"),)
    assert quantized_layers(view.root) == ()
    assert (view.attention(), view.attention_choices()) == (None, ())
    assert view.device_type == "cpu"
    ids = torch.ones(2, 3, dtype=torch.long)
    assert view.token_ids({"x": torch.ones(2, 3), "arg0": ids}) is ids
    assert view.logits(ids) is None


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: torch.compile(m, backend="eager")])
def test_a_transformers_model(llama, wrap):
    view = PlainView(wrap(llama))
    prefix = "" if view.root is llama else "_orig_mod."
    assert repeated_blocks(view.root) == (f"{prefix}model.layers.0", f"{prefix}model.layers.1")
    assert (view.head(), view.embedding()) == (f"{prefix}lm_head", f"{prefix}model.embed_tokens")
    assert tied_groups(view.root) == (
        (f"{prefix}model.embed_tokens.weight", f"{prefix}lm_head.weight"),
    )
    assert view.attention() == "sdpa"
    assert view.attention_choices() == ("eager",)
    view.set_attention("eager")
    assert (view.attention(), view.attention_choices()) == ("eager", ("sdpa",))
    view.set_attention("sdpa")


def test_logits_of_a_causal_model(llama):
    view = PlainView(llama)
    ids = torch.randint(3, 60, (2, 5))
    logits = view.logits(ids)
    assert logits.shape == (2, 5, 64)
    assert not logits.requires_grad


def test_logits_are_of_the_ids_alone_also_where_the_model_drops():
    config = tiny.llama().config
    config.attention_dropout = 0.5
    view = PlainView(transformers.LlamaForCausalLM(config).train())
    ids = torch.randint(3, 60, (2, 5))
    state = torch.get_rng_state()
    assert torch.equal(view.logits(ids), view.logits(ids))
    assert torch.equal(torch.get_rng_state(), state)


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
SIZES = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}


@pytest.mark.parametrize(
    ("kind", "config", "head"),
    [
        ("BertForSequenceClassification", transformers.BertConfig(**SMALL), "classifier"),
        ("RobertaForTokenClassification", transformers.RobertaConfig(**SMALL), "classifier"),
        ("BertForQuestionAnswering", transformers.BertConfig(**SMALL), "qa_outputs"),
        ("LlamaForSequenceClassification", transformers.LlamaConfig(**SMALL), "score"),
        ("T5ForTokenClassification", transformers.T5Config(**SIZES), "classifier"),
    ],
)
def test_a_head_is_what_stands_beside_the_body(kind, config, head):
    view = PlainView(getattr(transformers, kind)(config))
    assert view.head() == head
    assert view.logits(torch.ones(1, 3, dtype=torch.long)) is None


def test_what_reads_a_text_apart_from_the_one_it_writes_is_not_causal():
    view = PlainView(transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES)))
    assert view.logits(torch.ones(1, 3, dtype=torch.long)) is None


def test_a_model_without_parameters_or_embedding():
    view = PlainView(nn.ReLU())
    assert (view.device_type, view.head(), view.embedding()) == ("cpu", None, None)
    assert repeated_blocks(view.root) == ()
    assert view.token_ids({"arg0": torch.ones(2, 3, dtype=torch.long)}) is None


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURES = SMALL | {"intermediate_size": 16, "image_size": 8, "patch_size": 4}
WITHOUT_TOKENS = {
    "pictures": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**PICTURES)),
    "pictures, by convolution": lambda: transformers.CLIPVisionModel(
        transformers.CLIPVisionConfig(**PICTURES, projection_dim=16)
    ),
    "masked pictures": lambda: transformers.BeitForMaskedImageModeling(
        transformers.BeitConfig(**PICTURES, vocab_size=12)
    ),
    "sound": lambda: transformers.Wav2Vec2ForCTC(
        transformers.Wav2Vec2Config(
            **SMALL,
            intermediate_size=16,
            vocab_size=9,
            conv_dim=(8,),
            conv_stride=(4,),
            conv_kernel=(8,),
            num_feat_extract_layers=1,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        )
    ),
}


@pytest.mark.parametrize("kind", WITHOUT_TOKENS)
def test_a_model_that_reads_no_tokens_has_no_table_of_them(kind):
    view = PlainView(WITHOUT_TOKENS[kind]())
    assert view.embedding() is None
    assert view.token_ids({"arg0": torch.ones(2, 3, dtype=torch.long)}) is None
    assert facts_of_loop(view).host == "loop"


def test_packed_layers_are_known_by_their_class():
    bitsandbytes = pytest.importorskip("bitsandbytes")

    class Linear4bit(nn.Linear):
        """Another one of that name."""

    net = nn.Sequential(nn.Linear(2, 2), Linear4bit(2, 2))
    assert quantized_layers(net) == ()
    net.append(bitsandbytes.nn.LinearNF4(2, 2))
    assert quantized_layers(net) == ("2",)
    assert facts_of_loop(PlainView(net)).quantization == "bitsandbytes-4bit"


def test_weights_on_meta_are_no_ties():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert tied_groups(net) == ()


def test_facts(llama):
    optimizer = torch.optim.AdamW(llama.parameters(), 1e-3, eps=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    facts = facts_of_loop(PlainView(llama, optimizer, scaler), clip=1.0, num_micro=2)
    assert (facts.host, facts.clip, facts.num_micro, facts.scaler) == ("loop", 1.0, 2, 256.0)
    assert (facts.optimizer.name, facts.optimizer.lr, facts.optimizer.eps) == ("AdamW", 1e-3, 1e-6)
    assert (facts.vocab, facts.table_rows, facts.model_type) == (64, 64, "llama")
    assert [(g.dtype, g.trainable) for g in facts.param_groups] == [("float32", True)]
    assert sum(g.num_tensors for g in facts.param_groups) == len(list(llama.parameters()))
    assert not facts.compiled
    assert facts_of_loop(PlainView(torch.compile(llama, backend="eager"))).compiled
