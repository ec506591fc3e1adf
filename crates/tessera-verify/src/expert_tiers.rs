//! Checks what weights state of experts in two tiers of memory: that they are the experts of a layer, that the layer
//! can find out which of them a call uses before it reads the first, and that the layers are numbered in their order.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::{ExpertTier, OpView, Program, ValueId};

use crate::codes::T0345;
use crate::display;

/// Returns an error for each weight whose tiers no rank could follow. The types of the program are correct.
pub(crate) fn check(p: &Program) -> Diagnostics {
    let readers = p.value_readers();
    let mut out = Vec::new();
    let mut banks = Vec::new();
    for (i, _) in p.ops.iter().enumerate().filter(|(_, op)| op.states_tier()) {
        match read_bank(p, i, &readers) {
            Ok(bank) => banks.push(bank),
            Err(why) => out.push(display::error_at_op(&T0345, p, i, why)),
        }
    }
    if out.is_empty() {
        banks.sort_by_key(|bank| bank.reader);
        out.extend(check_layers(p, &banks));
    }
    out
}

/// A weight with tiers.
struct Bank {
    weight: usize,
    tier: ExpertTier,
    /// The grouped matmul that reads it.
    reader: usize,
    /// The numbers of rows of each expert, by which the layer knows the experts of a call.
    counts: ValueId,
    /// Experts of the rank.
    experts: u64,
}

fn read_bank(p: &Program, i: usize, readers: &[Vec<usize>]) -> Result<Bank, String> {
    let op = &p.ops[i];
    let Some(tier) = op.expert_tier() else {
        return Err("`tier_layer`, `tier_policy`, `tier_resident` and `tier_window` stand together".into());
    };
    let weight = op.results[0];
    let ty = p.type_of(weight);
    let whole = ty.layout.global_shape(&ty.shape, &p.mesh);
    let &[experts, _, _] = &whole[..] else {
        return Err(format!("a weight of shape {whole:?} is no stack of expert matrices"));
    };
    if tier.resident > experts {
        return Err(format!("{} resident experts of {experts}", tier.resident));
    }
    if let Some(load) = op.weight_load() {
        return Err(format!("the weight is transformed by `{}` as a whole when it is loaded", load.name()));
    }
    let of_weight = &readers[weight.0 as usize];
    let [reader] = of_weight[..] else {
        return Err(format!("{} ops read the weight, and one grouped_matmul must", of_weight.len()));
    };
    match p.ops[reader].view() {
        Ok(OpView::GroupedMatmul(v)) if v.w == weight && v.x != weight && v.counts != weight => {
            Ok(Bank { weight: i, tier, reader, counts: v.counts, experts: ty.shape[0] })
        }
        _ => Err(format!(
            "{} reads the weight as a whole; a grouped_matmul reads it expert by expert",
            display::describe_op(p, reader)
        )),
    }
}

/// Checks the layers of weights in the order of their readers.
fn check_layers(p: &Program, banks: &[Bank]) -> Diagnostics {
    let mut out = Vec::new();
    let mut firsts: BTreeMap<u64, &Bank> = BTreeMap::new();
    for bank in banks {
        let layer = bank.tier.layer;
        let last = firsts.last_key_value().map(|(last, _)| *last);
        let Some(first) = firsts.get(&layer).copied() else {
            let next = last.map_or(0, |last| last + 1);
            if layer != next {
                let message = format!("layer {layer} is used where layer {next} must follow");
                out.push(display::error_at_op(&T0345, p, bank.weight, message));
            }
            firsts.insert(layer, bank);
            continue;
        };
        let differs = match () {
            () if last != Some(layer) => Some("another layer begins before the weights of this one are used"),
            () if first.tier != bank.tier => Some("they state different tiers"),
            () if first.experts != bank.experts => Some("they have different numbers of experts"),
            () if first.counts != bank.counts => Some("their readers take their rows from different counts"),
            () => None,
        };
        out.extend(differs.map(|why| not_one_layer(p, [first, bank], why)));
    }
    out
}

fn not_one_layer(p: &Program, [first, bank]: [&Bank; 2], why: &str) -> Diagnostic {
    let message = format!("two weights of layer {} do not belong together: {why}", bank.tier.layer);
    let d = display::error_at_op(&T0345, p, bank.weight, message);
    display::with_op_label(d, p, first.weight, display::describe_op(p, first.weight))
}
