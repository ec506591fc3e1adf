//! The planted mistakes: a change of one file, and a part of the message that reports it.

/// A mistake in the valid project.
pub(super) struct Case {
    /// What the check is about.
    pub(super) check: &'static str,
    pub(super) path: &'static str,
    /// The text that is replaced once; the whole file is removed if this is empty.
    pub(super) from: &'static str,
    pub(super) to: &'static str,
    /// A part of the expected message.
    pub(super) message: &'static str,
}

const fn case(
    check: &'static str,
    path: &'static str,
    from: &'static str,
    to: &'static str,
    message: &'static str,
) -> Case {
    Case { check, path, from, to, message }
}

const TOPIC: &str = "docs/library/topics/05-topic.md";
const EXPLAINER: &str = "docs/library/explainers/01-explainer.md";
const CARD: &str = "docs/library/cards/nccl-user-guide.md";
const GPIPE: &str = "docs/library/cards/gpipe.md";
const GROUPS: &str = "docs/manual/groups.md";
const KV: &str = "docs/manual/kv.md";
const README: &str = "docs/library/README.md";
const QUESTIONS: &str = "docs/manual/README.md";
const LONG_QUOTATION: &str = "\"one two three four five six seven eight nine ten eleven twelve thirteen\"";
const TWO_HUNDRED: &str = concat!(
    "ten chars ten chars ten chars ten chars ten chars ten chars ten chars ten chars ten chars ten chars ",
    "ten chars ten chars ten chars ten chars ten chars ten chars ten chars ten chars ten chars ten chars !"
);

/// Every planted mistake, grouped by what the check is about.
pub(super) const CASES: &[Case] = &[
    // Numbers and names.
    case("numbers", TOPIC, "", "", "topic 05 is missing"),
    case("numbers", TOPIC, "topic: 05 topic", "topic: 06 topic", "topic 06 is also"),
    case("numbers", TOPIC, "topic: 05 topic", "topic: 25 topic", "topic 25 is not one of"),
    case("numbers", TOPIC, "topic: 05 topic", "topic: 05 other", "is not the name of the file"),
    case("numbers", TOPIC, "topic: 05 topic", "topics: 05", "state number and name"),
    case("numbers", GROUPS, "<!-- topic: 02 deadlock -->\n", "", "topic 02 is missing"),
    case("numbers", EXPLAINER, "", "", "explainer 01 is missing"),
    case("numbers", GPIPE, "", "", "restore this card"),
    case("numbers", GPIPE, "card: gpipe", "card: pipe", "state the name of the file"),
    // Sections.
    case("sections", TOPIC, "## Here", "## There", "write the sections What holds, Here"),
    case("sections", EXPLAINER, "## Read on", "## More", "write the sections The question"),
    case("sections", GPIPE, "## Claims", "## Statements", "write the sections Claims"),
    case("sections", GPIPE, "\n\nA.\n", "\n", "What it means here is empty"),
    case("sections", KV, "\n## Contract", "\n## Tripwires\n\n## Contract", "Tripwires is empty"),
    case("sections", TOPIC, "word word", "word", "What holds has 119 words"),
    case("sections", TOPIC, "../../../filetests/a.tir", "../cards/gpipe.md", "Here links nothing outside"),
    case("sections", TOPIC, "- **C-01**: one.", "One.", "Rules names no rule"),
    case(
        "sections",
        TOPIC,
        "- [nccl-1](../cards/nccl-user-guide.md#nccl-1): one",
        "One.",
        "Sources links no claim",
    ),
    case("sections", EXPLAINER, "`tessera plan models/demo`", "A picture.", "name the command that draws"),
    case("sections", TOPIC, "status: ready", "status: done", "state the status below the title"),
    case("card", CARD, "| licence | L |\n", "", "the table lacks `licence`"),
    case("card", CARD, "| licence | L |", "| licence | |", "the table lacks `licence`"),
    case("card", CARD, "2026-11-26", "yesterday", "`yesterday` is no date"),
    // Claims.
    case("claims", CARD, "### nccl-1", "### nccl-2", "write nccl-1"),
    case("claims", CARD, "### nccl-1", "### Claim", "is not the next id"),
    case("claims", GPIPE, "### gpipe-1", "### nccl-1", "begin with the same word"),
    case("claims", CARD, "One \"short", TWO_HUNDRED, "characters: write 1 to 200"),
    case("claims", CARD, "At: section 1.", "Section 1.", "nccl-1 has no place"),
    case("claims", CARD, "\"short quotation\"", LONG_QUOTATION, "quotes 13 words"),
    case(
        "claims",
        CARD,
        "\n## What it means",
        "### nccl-2\n\nTwo.\n\nAt: b.\n\n## What it means",
        "link it or remove it",
    ),
    case(
        "claims",
        CARD,
        "### nccl-1\n\nOne \"short quotation\" here.\n\nAt: section 1.\n",
        "None.\n",
        "has no claim",
    ),
    case("claims", TOPIC, "[nccl-1](", "[nccl-9](", "the text nccl-9 leads to nccl-1"),
    // Rules rest on claims that somebody read, and belong to topics.
    case(
        "grounds",
        CARD,
        "At: section 1.",
        "At: not read again: gone.",
        "G-01 rests on nccl-1, which nobody read",
    ),
    case(
        "grounds",
        GROUPS,
        " Why: [nccl-1](../library/cards/nccl-user-guide.md#nccl-1).",
        "",
        "G-01 speaks of NCCL",
    ),
    case(
        "grounds",
        GROUPS,
        "[nccl-1](../library/cards/nccl-user-guide.md#nccl-1)",
        "it is so",
        "a reason without a claim",
    ),
    case("grounds", KV, "**K-01** One", "**K-01** One in torch.compile", "K-01 speaks of torch"),
    case(
        "grounds",
        "docs/library/topics/12-topic.md",
        "**P-01** and **X-01**",
        "**P-01**",
        "no topic has X-01",
    ),
    // Explainers and wording.
    case("explainers", TOPIC, "**C-01**", "**C-09**", "there is no rule C-09"),
    case("explainers", EXPLAINER, "D-01 holds", "D-09 holds", "there is no rule D-09"),
    case(
        "explainers",
        EXPLAINER,
        "- D-01 holds.\n\nSo does C-01. And K-01 too.",
        "- D-01 holds.",
        "fewer than 2 rules",
    ),
    case("explainers", EXPLAINER, "- D-01 holds.", "- All holds.", "\"- All holds.\" names no rule"),
    case("explainers", EXPLAINER, "And K-01 too.", "And more.", "\"And more.\" names no rule"),
    case(
        "explainers",
        EXPLAINER,
        "And K-01 too.",
        "\n\n| a | b |\n| --- | --- |\n| one | two |",
        "\"one two\" names no rule",
    ),
    case(
        "wording",
        EXPLAINER,
        "Why?",
        "Shapes must match on all ranks.",
        "\"must match on all\" states an invariant",
    ),
    case(
        "wording",
        TOPIC,
        "## Here\n\n",
        "## Here\n\nIt is identical across ranks.\n\n",
        "states an invariant",
    ),
    // Links between explainers, topics, cards and drills.
    case("leads", EXPLAINER, "topics: 05, 02", "topics: 05", "the comment lists other topics"),
    case("leads", EXPLAINER, "cards: gpipe", "cards: gpipe, zero-bubble-pp", "the comment lists other cards"),
    case("leads", EXPLAINER, "<!-- cards: gpipe -->\n", "", "repeat the row"),
    case("leads", EXPLAINER, "[05](../topics/05-topic.md), ", "", "link topic 05"),
    case("leads", EXPLAINER, ", [02](../../manual/groups.md)", "", "link topic 02"),
    case(
        "leads",
        README,
        "| 01 explainer |",
        "| 09 explainer |",
        "no page has `<!-- explainer: 09 explainer -->`",
    ),
    case("leads", README, "| 01 explainer | 05, 02 | gpipe |\n", "", "add a row for `01 explainer`"),
    case("leads", EXPLAINER, "tessera drill a-drill", "tessera drill b-drill", "there is no drill `b-drill`"),
    case("leads", EXPLAINER, "`tessera drill a-drill`", "Nothing.", "Break it names no drill"),
    case(
        "leads",
        "docs/manual/control-plane.md",
        "drill `a-drill`",
        "filetest `a.tir`",
        "name the drill `a-drill`",
    ),
    case("leads", QUESTIONS, "| Q7: a? ", "| Q8: a? ", "write Q1, Q2"),
    case("leads", QUESTIONS, "drill `a-drill`", "no drill", "Q1 needs a drill and a page"),
    case("leads", "docs/library/symptoms.md", "[topic]", "[tropic]", "`tropic` is no page with rules"),
    // Anchors.
    case(
        "anchors",
        TOPIC,
        "nccl-user-guide.md#nccl-1",
        "nccl-user-guide.md#nccl-8",
        "has no heading #nccl-8",
    ),
    case(
        "anchors",
        KV,
        "\n## Contract",
        "\n[a](groups.md#bring-up)\n\n## Contract",
        "has no heading #bring-up",
    ),
    // Crosswalk.
    case("crosswalk", "docs/guides/lockstep.md", "Rule: C-01.", "Text.", "One call names no rule"),
    case("crosswalk", "docs/guides/lockstep.md", "Rule: C-01.", "Rule: C-08.", "there is no rule C-08"),
    case("crosswalk", GROUPS, "Rule: G-01.", "Text.", "Topologies names no rule"),
    case("crosswalk", README, "| Limits | C-01 |", "| Limits | none |", "Limits names no rule"),
    case("crosswalk", README, "| Limits | C-01 |", "| Bounds | C-01 |", "has no section `Bounds`"),
];
