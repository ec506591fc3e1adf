//! Medians, tails and shares of a timeline.

use crate::timeline::{ChunkSpan, Timeline, phase_kind, stream_order};

/// The spans of one kind of phase on one stream, over all ranks.
#[derive(Debug, PartialEq)]
pub(crate) struct PhaseRow {
    pub(crate) stream: String,
    pub(crate) kind: String,
    pub(crate) count: u64,
    pub(crate) median_ns: u64,
    pub(crate) p95_ns: u64,
    /// Of the time recorded on its stream, from 0 to 1.
    pub(crate) share: f64,
    /// Share of its own time in which its stream had nothing to do, from 0 to 1; none where that is not known of all.
    pub(crate) waits: Option<f64>,
    /// Collectives issued per phase, fewest and most.
    pub(crate) collectives: (u32, u32),
}

/// Times of the chunks of a run.
#[derive(Debug, PartialEq)]
pub(crate) struct ChunkTimes {
    /// From the run's start to the first chunk's last frame.
    pub(crate) first_ns: u64,
    /// Median from commit to last frame, chunk 0 left out where others exist.
    pub(crate) median_ns: u64,
    /// 95th percentile of the same.
    pub(crate) p95_ns: u64,
    /// Frames a second after the first chunk.
    pub(crate) steady_fps: Option<f64>,
}

/// A row per (stream, kind), by stream and then by time spent. The first chunk is left out where others exist.
pub(crate) fn phases(t: &Timeline) -> Vec<PhaseRow> {
    let first = t.chunks.first().filter(|_| t.chunks.len() > 1).map(|c| c.chunk);
    type Key = (String, String);
    type Group = (Key, Vec<u64>, (u32, u32), Option<u64>);
    let mut groups: Vec<Group> = Vec::new();
    for s in t.spans.iter().filter(|s| Some(s.chunk) != first) {
        let key = (s.stream.as_str(), phase_kind(&s.name));
        let at = groups.iter().position(|(k, ..)| (k.0.as_str(), k.1.as_str()) == key).unwrap_or_else(|| {
            groups.push(((key.0.into(), key.1.into()), Vec::new(), (s.collectives, s.collectives), Some(0)));
            groups.len() - 1
        });
        let (_, times, (low, high), waits) = &mut groups[at];
        *waits = waits.zip(s.waits.as_ref()).map(|(sum, own)| sum + own.ns);
        times.push(s.end_ns.saturating_sub(s.start_ns));
        *low = (*low).min(s.collectives);
        *high = (*high).max(s.collectives);
    }
    let total = |times: &[u64]| times.iter().map(|t| *t as f64).sum::<f64>();
    let of_stream = |stream: &str| -> f64 {
        groups.iter().filter(|(k, ..)| k.0 == stream).map(|(_, times, ..)| total(times)).sum()
    };
    let mut rows: Vec<PhaseRow> = groups
        .iter()
        .map(|((stream, kind), times, collectives, waits)| PhaseRow {
            stream: stream.clone(),
            kind: kind.clone(),
            count: times.len() as u64,
            median_ns: quantile(times, 50),
            p95_ns: quantile(times, 95),
            share: total(times) / of_stream(stream).max(1.0),
            waits: waits.map(|ns| ns as f64 / total(times).max(1.0)),
            collectives: *collectives,
        })
        .collect();
    rows.sort_by(|a, b| {
        (stream_order(&a.stream), &a.stream)
            .cmp(&(stream_order(&b.stream), &b.stream))
            .then(b.share.total_cmp(&a.share))
            .then(a.kind.cmp(&b.kind))
    });
    rows
}

/// Times of the chunks; none without a chunk.
pub(crate) fn chunk_times(t: &Timeline) -> Option<ChunkTimes> {
    let (first, rest) = t.chunks.split_first()?;
    let steady = if rest.is_empty() { &t.chunks[..] } else { rest };
    let walls: Vec<u64> = steady.iter().map(wall).collect();
    let frames: f64 = rest.iter().map(|c| f64::from(c.frames)).sum::<f64>() + t.left_out_frames as f64;
    let span = rest.last().map_or(0, |c| c.end_ns.saturating_sub(first.end_ns));
    Some(ChunkTimes {
        first_ns: first.end_ns,
        median_ns: quantile(&walls, 50),
        p95_ns: quantile(&walls, 95),
        steady_fps: (span > 0).then(|| frames * 1e9 / span as f64),
    })
}

/// From commit to last frame.
pub(crate) fn wall(c: &ChunkSpan) -> u64 {
    c.end_ns.saturating_sub(c.start_ns)
}

/// Nearest-rank quantile; 0 of nothing.
pub(crate) fn quantile(times: &[u64], percent: usize) -> u64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::timeline::tests::sample;

    #[test]
    fn quantiles_are_by_nearest_rank() {
        let times: Vec<u64> = (1..=20).rev().collect();
        assert_eq!((quantile(&times, 50), quantile(&times, 95), quantile(&times, 100)), (10, 19, 20));
        assert_eq!((quantile(&[7], 50), quantile(&[], 50)), (7, 0));
    }

    #[test]
    fn steps_of_a_phase_count_together() {
        let rows = phases(&Timeline::from_record(&sample(5)));
        let names: Vec<_> = rows.iter().map(|r| (r.stream.as_str(), r.kind.as_str(), r.count)).collect();
        assert_eq!(names, [("compute", "denoise", 8), ("compute", "clean", 4), ("decode", "decode", 4)]);
        assert_eq!((rows[0].median_ns, rows[0].collectives), (4_000_000, (6, 6)));
        assert!((rows[0].share - 8.0 / 9.0).abs() < 1e-3 && (rows[2].share - 1.0).abs() < 1e-12);
    }

    #[test]
    fn the_steady_rate_leaves_the_first_chunk_out() {
        let times = chunk_times(&Timeline::from_record(&sample(5))).unwrap();
        assert_eq!((times.first_ns, times.median_ns), (11_000_000, 10_000_000));
        assert_eq!(times.steady_fps, Some(1200.0));
        assert_eq!(chunk_times(&Timeline::from_record(&sample(1))).unwrap().steady_fps, None);
        assert_eq!(chunk_times(&Timeline::default()), None);
    }
}
