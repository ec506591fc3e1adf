//! Exchanges that send e4m3: a kernel encodes the operand as words, the words travel, and a kernel decodes them to the
//! result. The words lie in scratch memory, which belongs to the exchange memory, so that peers can write them there.

use std::collections::BTreeMap;

use tessera_ir::{OpView, Program, Type, WIRE_BLOCK};

use crate::device_memory::ALIGNMENT;

/// Where the words of an exchange lie, as byte offsets into scratch memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WireWords {
    /// The encoded operand.
    pub(super) sent: u64,
    /// What members send to this rank.
    pub(super) received: u64,
}

/// Places the words of each exchange of a program that sends e4m3 behind scratch memory of `end` bytes, by op. Those of
/// one stream share memory: a rank begins an exchange once it has decoded the one before, and no peer sends earlier.
pub(super) fn place_wire_words(p: &Program, views: &[OpView], end: &mut u64) -> BTreeMap<usize, WireWords> {
    let exchanges = p.ops.iter().zip(views).enumerate().filter_map(|(i, (op, view))| match view {
        OpView::AllToAll(v) if v.wire.is_some() => {
            let bytes = |ty: &Type| type_on_wire(ty).byte_size().0.next_multiple_of(ALIGNMENT);
            let received = p.collective_result(op).map_or(0, |v| bytes(p.type_of(v)));
            Some((i, op.stream, bytes(p.type_of(v.x)), received))
        }
        _ => None,
    });
    let exchanges: Vec<_> = exchanges.collect();
    let mut by_stream = BTreeMap::new();
    for (_, stream, sent, received) in &exchanges {
        let (most_sent, most_received) = by_stream.entry(*stream).or_insert((0, 0));
        (*most_sent, *most_received) = ((*sent).max(*most_sent), (*received).max(*most_received));
    }
    let places: BTreeMap<_, _> = by_stream
        .into_iter()
        .map(|(stream, (sent, received))| {
            let words = WireWords { sent: *end, received: *end + sent };
            *end += sent + received;
            (stream, words)
        })
        .collect();
    exchanges.iter().map(|(i, stream, ..)| (*i, places[stream])).collect()
}

/// Returns the type of a value whose rows are words: four numbers of e4m3 in each, and a scale per block.
pub(super) fn type_on_wire(ty: &Type) -> Type {
    let mut shape = ty.shape.clone();
    if let Some(width) = shape.last_mut() {
        *width = width.div_ceil(4) + width.div_ceil(WIRE_BLOCK as u64);
    }
    Type { shape, ..ty.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::parse_all;

    #[test]
    fn exchanges_of_a_stream_share_words() {
        let text = "program @p role(r) mesh(ep=2) streams(compute, a2a) { \
            %x = input : f32[4, 6, 130] {ep: shard(1)} @compute \
            %y = input : f32[4, 2, 260] {ep: shard(1)} @compute \
            %t = ttile.collective.issue all_to_all %x {axis = \"ep\", concat = 1, split = 0, wire = \"fp8_e4m3\"} @a2a \
            %a = ttile.collective.wait %t @compute \
            %u = ttile.collective.issue all_to_all %y {axis = \"ep\", concat = 1, split = 0} @a2a \
            %b = ttile.collective.wait %u @compute \
            %v = ttile.collective.issue all_to_all %y {axis = \"ep\", concat = 1, split = 0, wire = \"fp8_e4m3\"} @a2a \
            %c = ttile.collective.wait %v @compute \
            output \"a\", %a output \"b\", %b output \"c\", %c }";
        let p = parse_all(text, "test").expect("a program").remove(0);
        let views: Vec<OpView> = p.ops.iter().map(|op| op.view().expect("a view")).collect();
        let mut end = ALIGNMENT;
        let placed = place_wire_words(&p, &views, &mut end);
        // 24 rows of 33 + 2 words on either side, where the other exchange has 8 of 65 + 3.
        let bytes = (24 * 35 * 4_u64).next_multiple_of(ALIGNMENT);
        let words = WireWords { sent: ALIGNMENT, received: ALIGNMENT + bytes };
        assert_eq!(placed.values().copied().collect::<Vec<_>>(), [words; 2]);
        assert_eq!(end, ALIGNMENT + 2 * bytes);
    }
}
