//! Medians, 95th percentiles and time shares of a timeline.

use crate::timeline::{Timeline, TimelineChunk, phase_kind, stream_order};

/// Statistics of one kind of phase on one stream, over all ranks.
#[derive(Debug, PartialEq)]
pub(crate) struct PhaseStats {
    pub(crate) stream: String,
    pub(crate) kind: String,
    pub(crate) count: u64,
    pub(crate) median_ns: u64,
    pub(crate) p95_ns: u64,
    /// Share of the time recorded on the stream, from 0 to 1.
    pub(crate) stream_share: f64,
    /// Share of the phase's time in which its stream was idle, from 0 to 1; `None` unless it is
    /// known for every span.
    pub(crate) wait_share: Option<f64>,
    /// Minimum and maximum number of collectives issued per phase.
    pub(crate) collective_range: (u32, u32),
}

/// Chunk latencies and the steady frame rate of a run.
#[derive(Debug, PartialEq)]
pub(crate) struct ChunkTimeStats {
    /// Time from the run's start to the first chunk's last frame.
    pub(crate) first_ns: u64,
    /// Median time from commit to last frame, without chunk 0 if there are others.
    pub(crate) median_ns: u64,
    /// 95th percentile of the time from commit to last frame.
    pub(crate) p95_ns: u64,
    /// Frames per second after the first chunk.
    pub(crate) steady_fps: Option<f64>,
}

/// Returns one row per pair of stream and phase kind, sorted by stream and then by time spent. The
/// first chunk is left out if there are others.
pub(crate) fn phase_stats(t: &Timeline) -> Vec<PhaseStats> {
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
        *waits = waits.zip(s.waits.as_ref()).map(|(sum, own)| sum + own.total_ns);
        times.push(s.end_ns.saturating_sub(s.start_ns));
        *low = (*low).min(s.collectives);
        *high = (*high).max(s.collectives);
    }
    let total = |times: &[u64]| times.iter().map(|t| *t as f64).sum::<f64>();
    let stream_total = |stream: &str| -> f64 {
        groups.iter().filter(|(k, ..)| k.0 == stream).map(|(_, times, ..)| total(times)).sum()
    };
    let mut rows: Vec<PhaseStats> = groups
        .iter()
        .map(|((stream, kind), times, collectives, waits)| PhaseStats {
            stream: stream.clone(),
            kind: kind.clone(),
            count: times.len() as u64,
            median_ns: nearest_rank_quantile(times, 50),
            p95_ns: nearest_rank_quantile(times, 95),
            stream_share: total(times) / stream_total(stream).max(1.0),
            wait_share: waits.map(|ns| ns as f64 / total(times).max(1.0)),
            collective_range: *collectives,
        })
        .collect();
    rows.sort_by(|a, b| {
        (stream_order(&a.stream), &a.stream)
            .cmp(&(stream_order(&b.stream), &b.stream))
            .then(b.stream_share.total_cmp(&a.stream_share))
            .then(a.kind.cmp(&b.kind))
    });
    rows
}

/// Returns the chunk latencies; `None` for a timeline without chunks.
pub(crate) fn chunk_times(t: &Timeline) -> Option<ChunkTimeStats> {
    let (first, rest) = t.chunks.split_first()?;
    let steady = if rest.is_empty() { &t.chunks[..] } else { rest };
    let walls: Vec<u64> = steady.iter().map(chunk_wall_ns).collect();
    let frames: f64 = rest.iter().map(|c| f64::from(c.frames)).sum::<f64>() + t.omitted_frames as f64;
    let span = rest.last().map_or(0, |c| c.end_ns.saturating_sub(first.end_ns));
    Some(ChunkTimeStats {
        first_ns: first.end_ns,
        median_ns: nearest_rank_quantile(&walls, 50),
        p95_ns: nearest_rank_quantile(&walls, 95),
        steady_fps: (span > 0).then(|| frames * 1e9 / span as f64),
    })
}

/// Returns the time from a chunk's commit to its last frame.
pub(crate) fn chunk_wall_ns(c: &TimelineChunk) -> u64 {
    c.end_ns.saturating_sub(c.start_ns)
}

/// Returns the nearest-rank quantile; 0 for an empty list.
pub(crate) fn nearest_rank_quantile(times: &[u64], percent: usize) -> u64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::tests::sample;

    #[test]
    fn quantiles_are_by_nearest_rank() {
        let times: Vec<u64> = (1..=20).rev().collect();
        assert_eq!(
            (
                nearest_rank_quantile(&times, 50),
                nearest_rank_quantile(&times, 95),
                nearest_rank_quantile(&times, 100)
            ),
            (10, 19, 20)
        );
        assert_eq!((nearest_rank_quantile(&[7], 50), nearest_rank_quantile(&[], 50)), (7, 0));
    }

    #[test]
    fn steps_of_a_phase_count_together() {
        let rows = phase_stats(&Timeline::from_record(&sample(5)));
        let names: Vec<_> = rows.iter().map(|r| (r.stream.as_str(), r.kind.as_str(), r.count)).collect();
        assert_eq!(names, [("compute", "denoise", 8), ("compute", "clean", 4), ("decode", "decode", 4)]);
        assert_eq!((rows[0].median_ns, rows[0].collective_range), (4_000_000, (6, 6)));
        assert!(
            (rows[0].stream_share - 8.0 / 9.0).abs() < 1e-3 && (rows[2].stream_share - 1.0).abs() < 1e-12
        );
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
