//! Random language models with random plans, and the calls that they run.

use std::collections::BTreeMap;

use tessera_base::Diagnostics;
use tessera_base::random::{DrawKey, Rng, fill_normals};
use tessera_ir::{Bundle, Opcode, Program};
use tessera_mesh::Axis;
use tessera_models::{
    DecoderModel, IdSource, LOGITS, NEXT_IDS, PagedCache, ROTARY_FREQUENCIES, TokenBucket, TokenInput,
    TokenOutput, TokenPhase, build_token_phases, token_ids_name,
};
use tessera_plan::{DecoderPrecision, LogicalModel, Mapping, Strategy, lower};
use tessera_reference::{CallScalar, Tensor};

/// Architectures that are drawn.
pub const FAMILIES: [&str; 5] = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
];

/// The bucket that reads prompts and the one that decodes.
const BUCKETS: [TokenBucket; 2] =
    [TokenBucket { sequences: 1, rows: 4 }, TokenBucket { sequences: 2, rows: 1 }];
/// Positions of a page, which divide no part of a prompt.
const PAGE_ROWS: u64 = 3;
const PAGES_PER_SEQUENCE: u64 = 4;
/// Pages of the two sequences, in an order that no sequence shares with its positions.
const PAGES: [[f64; 4]; 2] = [[6.0, 1.0, 4.0, 0.0], [2.0, 7.0, 3.0, -1.0]];

/// A model, what its programs return, and a mapping.
pub struct Case {
    /// The model that the programs compute.
    pub model: DecoderModel,
    /// What the programs return.
    pub output: TokenOutput,
    /// Text of the mapping.
    pub mapping: String,
    /// The table `[experts]` of the mapping.
    pub experts: String,
}

/// One call of a phase: the numbers and the ids that it reads.
pub struct TokenCall {
    /// Index of the phase among those of the plan.
    pub phase: usize,
    /// Numbers of the call by name.
    pub scalars: BTreeMap<String, CallScalar>,
    /// `None` for a phase that decodes the ids which the one before chose.
    pub ids: Option<(String, Tensor)>,
}

impl TokenCall {
    /// Lets the one prompt of a call end after `rows` rows.
    fn shorten_prompt(&mut self, rows: usize) {
        if let Some(last) = self.scalars.get_mut(TokenInput::LAST) {
            *last = CallScalar::Float(Tensor::new(&[1], vec![(rows - 1) as f64]));
        }
    }
}

impl Case {
    /// Draws a case; a seed and an index give the same one.
    pub fn draw(seed: u64, index: u32) -> Case {
        let mut d = Rng::new(seed, [index, 0]);
        let family = FAMILIES[index as usize % FAMILIES.len()];
        let config = draw_config(&mut d, family);
        let model =
            DecoderModel::parse("config.json", &config).unwrap_or_else(|ds| panic!("{config}: {ds:#?}"));
        let has_experts = model.experts.is_some();
        // A third of the models with experts shares whole experts among the ranks of tp.
        let over_tp = has_experts && index as usize / FAMILIES.len() % 3 == 2;
        let (tp, ep) = (1 + d.next_below(3), if has_experts && !over_tp { 1 + d.next_below(3) } else { 1 });
        let pp = if tp * ep <= 4 { 1 + d.next_below(2) } else { 1 };
        let mut experts = match has_experts {
            true if over_tp => draw_experts(&mut d, "tp", tp),
            true => draw_experts(&mut d, "ep", ep),
            false => String::new(),
        };
        if let Some(layers) = &model.experts {
            let first = (0..model.extents.layers).find(|layer| !layers.dense_layers.contains(layer));
            experts += &draw_copies(&mut d, (first.unwrap_or(0), layers.count), &experts);
        }
        let output = d.pick_one(&[TokenOutput::Logits, TokenOutput::Logits, TokenOutput::Next]);
        let mapping = format!("[mesh]\ntp = {tp}\nep = {ep}\npp = {pp}\n{experts}");
        Case { model, output, mapping, experts }
    }

    /// Returns the name of the output that a case compares.
    pub fn output_name(&self) -> &'static str {
        match self.output {
            TokenOutput::Next => NEXT_IDS,
            TokenOutput::Logits => LOGITS,
        }
    }

    /// Returns the programs: one reads prompts, one decodes, and if it chooses ids another decodes these.
    fn list_phases(&self) -> Vec<TokenPhase> {
        let keeps_ids = self.output == TokenOutput::Next;
        let decode = TokenPhase { keeps_ids, ..TokenPhase::from_call(BUCKETS[1]) };
        let next = keeps_ids.then_some(TokenPhase { ids: IdSource::LastPhase, ..decode });
        [TokenPhase::from_call(BUCKETS[0]), decode].into_iter().chain(next).collect()
    }

    /// Returns the logical programs for a mesh.
    pub fn logical(&self, tp: u32) -> LogicalModel {
        let m = &self.model;
        let cache = PagedCache {
            page_rows: PAGE_ROWS,
            pages: 2 * PAGES_PER_SEQUENCE,
            pages_per_sequence: PAGES_PER_SEQUENCE,
            replicates_heads: !m.is_latent() && u64::from(tp) > m.kv_heads,
        };
        let phases = self.list_phases();
        LogicalModel {
            phases: build_token_phases(m, cache, &phases, self.output),
            calls: phases.iter().map(TokenPhase::name).map(|name| (name.clone(), vec![name])).collect(),
            heads: if m.is_latent() || cache.replicates_heads { m.heads } else { m.kv_heads },
            head_dim: m.head_dim,
            hidden_size: m.extents.width,
            ffn_size: m.narrowest_feed_forward(),
            tokens: BUCKETS.iter().map(|b| b.sequences * b.rows).max().unwrap(),
            blocks: m.extents.layers,
            experts: m.experts.as_ref().map_or(0, |e| e.count),
            decoder: DecoderPrecision::Exact,
        }
    }

    /// Lowers the model under a mapping.
    ///
    /// # Errors
    /// The reasons why the mapping does not fit the model.
    pub fn lower(&self, mapping: &str) -> Result<Bundle, Diagnostics> {
        let mut mapping = Mapping::parse("mapping.toml", mapping)?;
        mapping.strategy = Strategy::Megatron;
        lower(&self.logical(mapping.mesh.axis_size(Axis::Tp)), &mut mapping)
    }

    /// Returns the same routing on one rank.
    pub fn mapping_of_one_rank(&self) -> String {
        self.experts.clone()
    }

    /// Returns the weights by name.
    pub fn weights(&self, seed: u64) -> BTreeMap<String, Tensor> {
        let mut weights = BTreeMap::new();
        for p in &self.logical(1).phases {
            for op in p.ops.iter().filter(|o| o.opcode == Opcode::Weight) {
                let (name, shape) = (op.name.clone().unwrap(), &p.type_of(op.results[0]).shape);
                let draw = weights.len() as u64;
                weights.entry(name).or_insert_with_key(|name| self.draw_weight(name, shape, (seed, draw)));
            }
        }
        weights
    }

    fn draw_weight(&self, name: &str, shape: &[u64], (seed, draw): (u64, u64)) -> Tensor {
        let shape: Vec<usize> = shape.iter().map(|n| *n as usize).collect();
        if name == ROTARY_FREQUENCIES {
            return Tensor::new(&shape, self.model.rotary_frequencies().into_iter().map(f64::from).collect());
        }
        let mut numbers = vec![0.0_f32; shape.iter().product()];
        fill_normals(DrawKey { seed, chunk: 0, draw: draw as u32 }, 0, &mut numbers);
        let (mean, spread) = match shape.as_slice() {
            [_] if name.contains("norm") => (1.0, 0.2),
            [_] => (0.0, 0.2),
            [.., k] => (0.0, (1.5 / *k as f32).sqrt()),
            [] => (0.0, 1.0),
        };
        Tensor::new(&shape, numbers.into_iter().map(|x| f64::from(mean + spread * x)).collect())
    }

    /// Returns the calls: two prompts in parts, then ids of both texts, and at last of the first one alone.
    pub fn calls(&self, seed: u64) -> Vec<TokenCall> {
        let mut d = Rng::new(seed, [0, 1]);
        // The second prompt has three ids; its fourth row is overwritten by the next call.
        let parts = [(0, 0.0), (1, 0.0), (0, 4.0)];
        let mut calls: Vec<TokenCall> =
            parts.into_iter().map(|(text, start)| self.call(&mut d, 0, &[PAGES[text]], &[start])).collect();
        calls[1].shorten_prompt(3);
        calls.extend(
            [[8.0, 3.0], [9.0, 4.0], [10.0, -1.0]].map(|starts| self.call(&mut d, 1, &PAGES, &starts)),
        );
        if self.output == TokenOutput::Next {
            // The ids of the call before, and then those of this one.
            calls.extend([[11.0, -1.0]].map(|starts| self.call(&mut d, 2, &PAGES, &starts)));
        }
        calls
    }

    fn call(&self, d: &mut Rng, phase: usize, pages: &[[f64; 4]], starts: &[f64]) -> TokenCall {
        let TokenPhase { bucket, ids: source, .. } = self.list_phases()[phase];
        let sequences = starts.len();
        let rows = sequences * bucket.rows as usize;
        let ids = (0..rows).map(|_| d.next_below(self.model.extents.vocab as usize) as f64).collect();
        let each =
            |f: &mut dyn FnMut(usize) -> f64| Tensor::new(&[sequences], (0..sequences).map(f).collect());
        let mut scalars = vec![
            (TokenInput::PAGES, Tensor::new(&[sequences, 4], pages.concat())),
            (TokenInput::START, Tensor::new(&[sequences], starts.to_vec())),
        ];
        if self.output == TokenOutput::Next || self.model.experts.is_some() {
            let last = each(&mut |i| ((i + 1) * bucket.rows as usize - 1) as f64);
            scalars.push((TokenInput::LAST, last));
        }
        if self.output == TokenOutput::Next {
            scalars.extend([
                (TokenInput::DRAW, each(&mut |i| starts[i].max(0.0))),
                (TokenInput::SEED, each(&mut |_| d.next_below(1000) as f64)),
                // Numbers that f32 and f64 hold alike.
                (TokenInput::TEMPERATURE, each(&mut |_| d.pick_one(&[0.0, 0.75, 1.5]))),
                (TokenInput::TOP_K, each(&mut |_| d.next_below(9) as f64)),
                (TokenInput::TOP_P, each(&mut |_| d.pick_one(&[0.5, 0.875, 1.0]))),
            ]);
        }
        let scalars = scalars.into_iter().map(|(name, x)| (name.to_string(), CallScalar::Float(x))).collect();
        let ids = (token_ids_name(bucket), Tensor::new(&[rows], ids));
        TokenCall { phase, scalars, ids: (source == IdSource::Call).then_some(ids) }
    }
}

/// Returns the program of each rank in a phase.
pub fn programs_of_ranks(bundle: &Bundle, phase: usize) -> Vec<&Program> {
    bundle.mesh.iter().map(|r| &bundle.phases[phase].programs[bundle.role_index(r).unwrap()]).collect()
}

/// Draws the table `[experts]` for the ranks of an axis, whose number divides the number of token groups.
fn draw_experts(d: &mut Rng, axis: &str, ranks: usize) -> String {
    let tokens = d.pick_one(&["replicated", "sharded"]);
    let combine = d.pick_one(&["ordered", "reduced"]);
    let mut text = format!("[experts]\naxis = \"{axis}\"\ntokens = \"{tokens}\"\ncombine = \"{combine}\"\n");
    // A group of one token never drops a choice, so there are few groups.
    let (capacity, groups) = (d.next_below(3), ranks * d.pick_one(&[1, 1, 2]));
    if capacity > 0 {
        text +=
            &format!("token_groups = {groups}\ncapacity_factor = {}\n", d.pick_one(&["0.5", "0.75", "1.0"]));
    }
    if capacity > 1 {
        text += "reroute_bytes = 200\n";
    }
    text
}

/// Draws how often the experts of a layer were chosen, and copies of the hot ones, for half of the models. Rerouting
/// knows no copies.
fn draw_copies(d: &mut Rng, (layer, experts): (u64, u64), keys: &str) -> String {
    if keys.contains("reroute") || d.next_below(2) == 0 {
        return String::new();
    }
    let chosen: Vec<u64> = (0..experts).map(|_| d.next_below(20) as u64).collect();
    let replicas = d.next_below(4);
    format!("replicas = {replicas}\n[[experts.choices]]\nlayer = {layer}\nexperts = {chosen:?}\n")
}

/// Draws a config with extents that few meshes divide.
fn draw_config(d: &mut Rng, family: &str) -> String {
    let mut pick = |low: usize, high: usize| low + d.next_below(high - low + 1);
    let (kv_heads, share) = (pick(1, 3), pick(1, 2));
    let heads = kv_heads * share;
    let (layers, width, inner, vocab) = (pick(1, 2), 2 * pick(6, 12), pick(9, 20), pick(17, 40));
    let head = 2 * pick(1, 4);
    let (experts, top_k, expert_inner) = (3 * pick(1, 3), pick(1, 3), pick(4, 9));
    let tied = pick(0, 1) == 1;
    let common = format!(
        "\"architectures\": [\"{family}\"], \"hidden_act\": \"silu\", \"max_position_embeddings\": 64, \"rms_norm_eps\": 1e-5, \
         \"rope_theta\": 100.0, \"tie_word_embeddings\": {tied}, \"vocab_size\": {vocab}, \"hidden_size\": {width}, \
         \"num_hidden_layers\": {layers}, \"num_attention_heads\": {heads}, \"attention_bias\": false"
    );
    let grouped = format!("{common}, \"num_key_value_heads\": {kv_heads}, \"head_dim\": {head}");
    match family {
        "LlamaForCausalLM" => format!("{{{grouped}, \"intermediate_size\": {inner}, \"mlp_bias\": false}}"),
        "MistralForCausalLM" => {
            let grouped = grouped.replace(", \"attention_bias\": false", "");
            format!("{{{grouped}, \"intermediate_size\": {inner}, \"sliding_window\": {}}}", pick(2, 6))
        }
        "Qwen3ForCausalLM" => {
            format!("{{{grouped}, \"intermediate_size\": {inner}, \"use_sliding_window\": false}}")
        }
        "Qwen3MoeForCausalLM" => format!(
            "{{{grouped}, \"intermediate_size\": {inner}, \"moe_intermediate_size\": {expert_inner}, \"num_experts\": {experts}, \
             \"num_experts_per_tok\": {top_k}, \"norm_topk_prob\": {}, \"decoder_sparse_step\": 1, \"mlp_only_layers\": [], \
             \"use_sliding_window\": false}}",
            pick(0, 1) == 1
        ),
        _ => {
            let (q_rank, kv_rank, nope, v) = (pick(4, 9), pick(4, 9), pick(2, 5), pick(3, 7));
            let keep = pick(2, 3);
            format!(
                "{{{common}, \"num_key_value_heads\": {heads}, \"intermediate_size\": {inner}, \"moe_intermediate_size\": {expert_inner}, \
                 \"n_routed_experts\": {experts}, \"num_experts_per_tok\": {}, \"n_shared_experts\": 1, \"n_group\": 3, \
                 \"topk_group\": {keep}, \"norm_topk_prob\": true, \"routed_scaling_factor\": 1.5, \"scoring_func\": \"sigmoid\", \
                 \"topk_method\": \"noaux_tc\", \"first_k_dense_replace\": {}, \"moe_layer_freq\": 1, \"q_lora_rank\": {q_rank}, \
                 \"kv_lora_rank\": {kv_rank}, \"qk_nope_head_dim\": {nope}, \"qk_rope_head_dim\": {head}, \"v_head_dim\": {v}}}",
                top_k.min(keep * experts / 3),
                layers - 1
            )
        }
    }
}
