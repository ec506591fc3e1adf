//! The exchange of halos: the rows beside a member's shard of a picture, and the digests by which their
//! receiver checks that they are those of its neighbours.
//!
//! A member contributes the first and the last row of each frame and, behind them, a digest of each of the
//! two. The digest covers the rows as they are in the shard, and its seed is their owner and edge. A receiver
//! digests its halo as it is in its own memory, so rows that are copied wrongly at either end, that come from
//! another member, or that are swapped do not pass.

use xxhash_rust::xxh3::Xxh3;

/// Elements of the two digests of a contribution: 64 bits each, in the bits of two numbers.
const DIGEST_ELEMENTS: usize = 4;

/// Returns the bytes that a member contributes to an exchange whose halo has `halo_bytes`.
#[must_use]
pub const fn contribution_bytes(halo_bytes: u64) -> u64 {
    halo_bytes + (DIGEST_ELEMENTS * size_of::<f32>()) as u64
}

/// Returns the contribution of member `me`: the first and the last row of each frame of `x`, which has `rows`
/// rows of `row` elements per frame, and the digests of both.
#[must_use]
pub fn collect_edge_rows(x: &[f32], me: usize, (rows, row): (usize, usize)) -> Vec<f32> {
    let frame_len = (rows * row).max(1);
    let edge = |at: usize| x.chunks_exact(frame_len).map(move |frame| &frame[at * row..][..row]);
    let last = rows.saturating_sub(1);
    let mut out: Vec<f32> = edge(0).zip(edge(last)).flat_map(|(a, b)| [a, b]).flatten().copied().collect();
    let digests = [
        digest_rows(edge(0), Some(EdgeOwner { member: me, edge: Edge::First })),
        digest_rows(edge(last), Some(EdgeOwner { member: me, edge: Edge::Last })),
    ];
    for digest in digests {
        out.extend([digest as u32, (digest >> 32) as u32].map(f32::from_bits));
    }
    out
}

/// Writes the halo of member `me`: for each frame the last row of the member before and the first row of the
/// member after, or zeros. Each view holds the [`collect_edge_rows`] of a member. Returns what the halo must be.
///
/// # Panics
/// Panics if a view has another length than a contribution.
pub fn write_halo(out: &mut [f32], views: &[&[f32]], me: usize, row: usize) -> ExpectedHalo {
    let owners = find_owners(me, views.len());
    for (side, owner) in owners.iter().enumerate() {
        let view = owner.map(|owner| (views[owner.member], owner.edge));
        let to = out.chunks_exact_mut(row.max(1)).skip(side).step_by(2);
        for (frame, to) in to.enumerate() {
            match view {
                Some((view, edge)) => to.copy_from_slice(&view[(2 * frame + edge as usize) * row..][..row]),
                None => to.fill(0.0),
            }
        }
    }
    let digests = owners.map(|owner| {
        let view = views[owner?.member];
        assert_eq!(view.len(), out.len() + DIGEST_ELEMENTS, "members exchange equal rows");
        let at = out.len() + DIGEST_ELEMENTS / 2 * owner?.edge as usize;
        Some(u64::from(view[at].to_bits()) | u64::from(view[at + 1].to_bits()) << 32)
    });
    ExpectedHalo { owners, digests }
}

/// Swaps the rows above with the rows below in each frame of a halo. For drills only.
pub fn swap_sides(halo: &mut [f32], row: usize) {
    for frame in halo.chunks_exact_mut((2 * row).max(1)) {
        let (above, below) = frame.split_at_mut(row);
        above.swap_with_slice(below);
    }
}

/// The digests that the neighbours of a member sent with their rows, above first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpectedHalo {
    owners: [Option<EdgeOwner>; 2],
    /// `None` at an edge of the picture, where the halo is zeros.
    digests: [Option<u64>; 2],
}

impl ExpectedHalo {
    /// Says what is wrong with a halo, or returns `None` if it holds the rows of the neighbours.
    #[must_use]
    pub fn find_difference(&self, halo: &[f32], row: usize) -> Option<String> {
        let digest =
            |side: usize, owner| digest_rows(halo.chunks_exact(row.max(1)).skip(side).step_by(2), owner);
        let expects = |side: usize, at: usize| {
            let want = self.digests[side].unwrap_or_else(|| {
                let zeros = vec![0.0; row];
                digest_rows(std::iter::repeat_n(&zeros[..], halo.len() / (2 * row).max(1)), None)
            });
            want == digest(at, self.owners[side])
        };
        let wrong: Vec<usize> = (0..2).filter(|side| !expects(*side, *side)).collect();
        let side = *wrong.first()?;
        if wrong.len() == 2 && expects(0, 1) && expects(1, 0) {
            let [above, below] = self.owners.map(describe_owner);
            return Some(format!("{above} belong above this shard and {below} below, and they are swapped"));
        }
        let name = ["above", "below"][side];
        Some(format!("the rows {name} this shard are not {}", describe_owner(self.owners[side])))
    }
}

/// The rows of a shard that one neighbour receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edge {
    First = 0,
    Last = 1,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EdgeOwner {
    member: usize,
    edge: Edge,
}

/// Returns who owns the rows above and below the shard of member `me`.
fn find_owners(me: usize, members: usize) -> [Option<EdgeOwner>; 2] {
    let before = me.checked_sub(1).map(|member| EdgeOwner { member, edge: Edge::Last });
    let after = (me + 1 < members).then_some(EdgeOwner { member: me + 1, edge: Edge::First });
    [before, after]
}

fn describe_owner(owner: Option<EdgeOwner>) -> String {
    match owner {
        Some(EdgeOwner { member, edge: Edge::First }) => format!("the first rows of member {member}"),
        Some(EdgeOwner { member, edge: Edge::Last }) => format!("the last rows of member {member}"),
        None => "the zeros at the edge of the picture".to_string(),
    }
}

fn digest_rows<'a>(rows: impl Iterator<Item = &'a [f32]>, owner: Option<EdgeOwner>) -> u64 {
    let seed = owner.map_or(u64::MAX, |o| 2 * o.member as u64 + o.edge as u64);
    let mut hash = Xxh3::with_seed(seed);
    rows.for_each(|row| hash.update(bytemuck::cast_slice(row)));
    hash.digest()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two frames over three members with 2, 1 and 2 rows of one element: rows 1 to 5 and 11 to 15.
    const SHARDS: [(&[f32], usize); 3] =
        [(&[1.0, 2.0, 11.0, 12.0], 2), (&[3.0, 13.0], 1), (&[4.0, 5.0, 14.0, 15.0], 2)];

    fn build_contributions() -> Vec<Vec<f32>> {
        SHARDS.iter().enumerate().map(|(m, (x, rows))| collect_edge_rows(x, m, (*rows, 1))).collect()
    }

    fn receive_halo(views: &[Vec<f32>], me: usize) -> (Vec<f32>, ExpectedHalo) {
        let views: Vec<&[f32]> = views.iter().map(Vec::as_slice).collect();
        let mut out = vec![f32::NAN; 4];
        let expected = write_halo(&mut out, &views, me, 1);
        (out, expected)
    }

    #[test]
    fn a_halo_holds_the_rows_beside_a_shard() {
        let edges = build_contributions();
        assert!(edges.iter().all(|e| e.len() as u64 * 4 == contribution_bytes(16)));
        let halos = [[0.0, 3.0, 0.0, 13.0], [2.0, 4.0, 12.0, 14.0], [3.0, 0.0, 13.0, 0.0]];
        for (me, halo) in halos.iter().enumerate() {
            let (out, expected) = receive_halo(&edges, me);
            assert_eq!(out, halo);
            assert_eq!(expected.find_difference(&out, 1), None);
        }
    }

    // proves: G-14
    #[test]
    fn swapped_and_changed_rows_are_found_on_every_side() {
        let edges = build_contributions();
        for me in 0..3 {
            let (mut out, expected) = receive_halo(&edges, me);
            swap_sides(&mut out, 1);
            let text = expected.find_difference(&out, 1).unwrap_or_default();
            assert!(text.contains("swapped"), "member {me}: {text}");
            swap_sides(&mut out, 1);
            for at in 0..4 {
                let mut changed = out.clone();
                changed[at] = f32::from_bits(changed[at].to_bits() ^ 1);
                let text = expected.find_difference(&changed, 1).unwrap_or_default();
                let side = ["the rows above", "the rows below"][at % 2];
                assert!(text.starts_with(side), "member {me}, element {at}: {text}");
            }
        }
    }

    #[test]
    fn rows_of_another_member_and_wrong_copies_of_rows_are_found() {
        let (good, mut edges) = (build_contributions(), build_contributions());
        edges.swap(0, 2);
        let (out, expected) = receive_halo(&edges, 1);
        let text = expected.find_difference(&out, 1).unwrap_or_default();
        assert_eq!(text, "the rows above this shard are not the last rows of member 0");
        // The sender copies its second last row in place of the last one.
        edges = good;
        edges[0][1] = 1.0;
        let (out, expected) = receive_halo(&edges, 1);
        assert!(expected.find_difference(&out, 1).is_some());
        let same = receive_halo(&build_contributions(), 0).1;
        assert_eq!(same.find_difference(&[0.0, 3.0, 0.0, 13.0], 1), None);
    }
}
