//! Computes the period of a stream from a call and the encode and decode around it: which ranks
//! decode, and which work waits for the decode.
//!
//! The leader's process decodes on its own thread beside its rank's engine, so the device
//! determines the waits. On a rank of the mesh, decode and phases share one device, which finishes
//! one before it starts the other, in submission order: the anchor before a call, the rest before
//! that call's first op, while the other ranks wait in their first collective. A simulated run does
//! the same, op by op; neither models kernels of one that would fill gaps of the other.
//!
//! Phases of pixels that are programs of the plan run at the end of a call, on the cores of the leader, or
//! on a GPU that no rank has.

use std::fmt;

use tessera_base::named_enum;

use crate::{MediaPlacement, Topology};

/// Times of the phases of pixels of one chunk in one place, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MediaTimes {
    /// Time to decode a chunk's first latent, the only one that the next chunk's anchor needs.
    pub first_ns: f64,
    /// Time to decode the chunk's other latents.
    pub rest_ns: f64,
    /// Time to encode the anchor; counts only if the chunks are coupled.
    pub encode_ns: f64,
}

impl MediaTimes {
    /// Returns the time to decode a whole chunk, in nanoseconds.
    #[must_use]
    pub fn decode_ns(&self) -> f64 {
        self.first_ns + self.rest_ns
    }

    /// Returns the time of all phases that a chunk needs, in nanoseconds.
    #[must_use]
    pub fn total_ns(&self, coupled: bool) -> f64 {
        self.decode_ns() + if coupled { self.encode_ns } else { 0.0 }
    }

    fn anchor_ns(&self, coupled: bool) -> f64 {
        if coupled { self.first_ns + self.encode_ns } else { 0.0 }
    }

    fn scale_by(&self, factor: f64) -> MediaTimes {
        MediaTimes {
            first_ns: self.first_ns * factor,
            rest_ns: self.rest_ns * factor,
            encode_ns: self.encode_ns * factor,
        }
    }
}

/// The phases of pixels on the cores of the leader's host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LeaderPixels {
    /// Times on all cores of the host.
    pub times: MediaTimes,
    /// Whether the ranks compute on the same cores, so that nothing overlaps their calls.
    pub shares_cores: bool,
}

/// The costs of media work around the generator in a stream: decoding a chunk to pixels, and
/// encoding the pixels that the next chunk needs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MediaCosts {
    /// Times if one device does all of it.
    pub device: MediaTimes,
    /// Whether the next chunk's context needs pixels of this chunk.
    pub coupled: bool,
    /// Efficiency of decode and encode when ranks share them, relative to an even split (halos and
    /// uneven rows cost the rest); `None` if only one rank can run them.
    pub shardable: Option<f64>,
    /// Times on the leader's CPU, if the phases of pixels are programs of the plan, which may run in the
    /// calls.
    pub leader: Option<LeaderPixels>,
}

impl MediaCosts {
    /// The costs without a decoder: the stream ends with latents.
    pub const NONE: MediaCosts = MediaCosts {
        device: MediaTimes { first_ns: 0.0, rest_ns: 0.0, encode_ns: 0.0 },
        coupled: false,
        shardable: None,
        leader: None,
    };

    /// Creates the costs of a chunk of `latents` equal latents that decodes in `decode_ns`, with an
    /// encode of `encode_ns`.
    #[must_use]
    pub fn from_chunk(
        latents: u64,
        decode_ns: f64,
        encode_ns: f64,
        coupled: bool,
        shardable: Option<f64>,
    ) -> MediaCosts {
        let first_ns = decode_ns / latents.max(1) as f64;
        let device = MediaTimes { first_ns, rest_ns: decode_ns - first_ns, encode_ns };
        MediaCosts { device, coupled, shardable, leader: None }
    }

    /// Returns the times if `ranks` ranks share the work with the efficiency [`MediaCosts::shardable`].
    #[must_use]
    pub fn shared_times(&self, ranks: u32) -> MediaTimes {
        let share = self.shardable.unwrap_or(1.0).clamp(f64::MIN_POSITIVE, 1.0) * f64::from(ranks.max(1));
        self.device.scale_by(share.recip())
    }
}

named_enum! {
    /// Which ranks decode, and when.
    pub enum DecodePlacement {
        /// Rank 0 of the mesh decodes on its compute device, and the mesh waits.
        OnMesh = "on_mesh",
        /// All ranks of the mesh share decode and encode: between two calls, or at the end of each call if
        /// they are programs of the plan.
        AllRanks = "all_ranks",
        /// Each rank of the first stage computes whole pictures at the end of each call.
        Replicas = "replicas",
        /// The leader decodes on the cores of its host, beside the calls.
        LeaderCpu = "leader_cpu",
        /// A rank outside the mesh decodes the whole chunk before the next one starts.
        Serial = "serial",
        /// A rank outside the mesh decodes; the next chunk starts as soon as the first latent is
        /// decoded and encoded.
        AnchorFirst = "anchor_first",
        /// Like `AnchorFirst`, but the mesh shares the decode of the first latent and the encode.
        /// The rank outside decodes every latent, because it holds the decoder's history.
        AnchorShared = "anchor_shared",
        /// A rank outside the mesh decodes while the mesh generates the next chunk: no work waits
        /// for pixels.
        Overlapped = "overlapped",
    }
}

impl DecodePlacement {
    /// Returns the number of ranks outside the mesh that decode.
    #[must_use]
    pub fn outside_ranks(self) -> u32 {
        u32::from(match self {
            DecodePlacement::OnMesh
            | DecodePlacement::AllRanks
            | DecodePlacement::Replicas
            | DecodePlacement::LeaderCpu => false,
            DecodePlacement::Serial
            | DecodePlacement::AnchorFirst
            | DecodePlacement::AnchorShared
            | DecodePlacement::Overlapped => true,
        })
    }

    /// Returns whether ranks share the decoder's work, which the executor must support.
    #[must_use]
    pub fn is_shared(self) -> bool {
        matches!(self, DecodePlacement::AllRanks | DecodePlacement::AnchorShared)
    }

    /// Returns the key of a mapping that gives this placement to phases of pixels that are programs of the
    /// plan; `None` if no mapping does.
    #[must_use]
    pub fn media(self) -> Option<MediaPlacement> {
        match self {
            DecodePlacement::AllRanks => Some(MediaPlacement::Mesh),
            DecodePlacement::Replicas => Some(MediaPlacement::Replicas),
            DecodePlacement::LeaderCpu => Some(MediaPlacement::Leader),
            DecodePlacement::AnchorFirst | DecodePlacement::Overlapped => Some(MediaPlacement::Outside),
            DecodePlacement::OnMesh | DecodePlacement::Serial | DecodePlacement::AnchorShared => None,
        }
    }

    /// Returns whether the placement is correct and possible for a stream's media costs.
    #[must_use]
    pub fn is_valid_for(self, media: &MediaCosts) -> bool {
        let possible = media.shardable.is_some() || !self.is_shared();
        let runs = match media.leader {
            Some(_) => self.media().is_some(),
            None => !matches!(self, DecodePlacement::Replicas | DecodePlacement::LeaderCpu),
        };
        let right = match self {
            DecodePlacement::OnMesh
            | DecodePlacement::AllRanks
            | DecodePlacement::Replicas
            | DecodePlacement::LeaderCpu => true,
            DecodePlacement::Serial | DecodePlacement::AnchorFirst | DecodePlacement::AnchorShared => {
                media.coupled
            }
            DecodePlacement::Overlapped => !media.coupled,
        };
        possible && runs && right
    }

    /// Returns whether the placement is possible with a leader inside the mesh or outside of it. Only a
    /// program of the plan runs in calls whichever leader sends them.
    #[must_use]
    pub fn fits_topology(self, media: &MediaCosts, topology: Topology) -> bool {
        match media.leader {
            Some(_) => self.outside_ranks() <= topology.outside_ranks(),
            None => self.outside_ranks() == topology.outside_ranks(),
        }
    }
}

impl fmt::Display for DecodePlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The time between chunks of a steady stream, its latency, and the load of its ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamPeriod {
    /// Time from one chunk to the next, in nanoseconds.
    pub ns: f64,
    /// Time from the start of a call to the last pixel of its chunk, in nanoseconds.
    pub latency_ns: f64,
    /// Fraction of the period in which a rank of the mesh generates.
    pub mesh_busy: f64,
    /// Fraction of the period in which the rank outside the mesh works; 0 if there is none.
    pub outside_busy: f64,
}

/// Computes the period of a mesh that generates a chunk in `generate_ns`. `shared` are the times of the
/// phases of pixels if the ranks share them.
#[must_use]
pub fn stream_period(
    generate_ns: f64,
    media: &MediaCosts,
    shared: &MediaTimes,
    placement: DecodePlacement,
) -> StreamPeriod {
    let (alone, coupled) = (&media.device, media.coupled);
    let total = |t: &MediaTimes| t.total_ns(coupled);
    let beside = |t: &MediaTimes| (generate_ns.max(t.decode_ns()), generate_ns + t.decode_ns());
    let (all, pixels) = (total(alone), alone.decode_ns());
    let (ns, latency_ns, outside) = match placement {
        // The call is in flight and waits for the rest of the previous chunk; the encode precedes
        // the pixels.
        DecodePlacement::OnMesh => {
            let before_call = if coupled { alone.first_ns } else { 0.0 };
            (generate_ns + all, generate_ns + all + pixels - before_call, 0.0)
        }
        // A call returns all its outputs when it ends.
        DecodePlacement::AllRanks => (generate_ns + total(shared), generate_ns + total(shared), 0.0),
        DecodePlacement::Replicas => (generate_ns + all, generate_ns + all, 0.0),
        DecodePlacement::LeaderCpu => {
            let leader = media.leader.map_or(*alone, |l| l.times);
            let all = total(&leader);
            let (ns, latency) = match (media.leader.is_some_and(|l| l.shares_cores), coupled) {
                (true, _) => (generate_ns + all, generate_ns + all),
                (false, true) => ((generate_ns + leader.anchor_ns(true)).max(all), generate_ns + all),
                (false, false) => beside(&leader),
            };
            (ns, latency, 0.0)
        }
        DecodePlacement::Serial => (generate_ns + all, generate_ns + pixels, all),
        DecodePlacement::AnchorFirst => {
            ((generate_ns + alone.anchor_ns(coupled)).max(all), generate_ns + all, all)
        }
        DecodePlacement::AnchorShared => {
            let anchor = shared.anchor_ns(coupled);
            ((generate_ns + anchor).max(pixels), generate_ns + pixels.max(anchor), pixels)
        }
        DecodePlacement::Overlapped => {
            let (ns, latency) = beside(alone);
            (ns, latency, pixels)
        }
    };
    let busy_fraction = |busy: f64| if ns > 0.0 { busy / ns } else { 0.0 };
    StreamPeriod {
        ns,
        latency_ns,
        mesh_busy: busy_fraction(generate_ns),
        outside_busy: busy_fraction(outside),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the frames per second, at twelve frames per chunk, of a 14B generator with 731 TFLOP
    /// per chunk at 60 % of 790 TFLOP/s per device, a decoder of 40.65 TFLOP and an encoder of 2.73
    /// TFLOP at `rate` TFLOP/s.
    fn fps(ranks: u32, rate: f64, decode: DecodePlacement) -> f64 {
        let ms = |tflop: f64, rate: f64| tflop / rate * 1e9;
        let coupled = decode != DecodePlacement::Overlapped;
        let media = MediaCosts::from_chunk(3, ms(40.65, rate), ms(2.73, rate), coupled, Some(1.0));
        assert!(decode.is_valid_for(&media));
        let shared = media.shared_times(ranks);
        let generate = ms(731.0, 0.6 * 790.0) / f64::from(ranks);
        12.0 / (stream_period(generate, &media, &shared, decode).ns * 1e-9)
    }

    #[test]
    fn periods_of_a_coupled_14b_stream() {
        // Ranks of the mesh, and frames per second with decode at 175 and at 400 TFLOP/s: derived
        // figures for 480×832.
        let table = [
            (DecodePlacement::Serial, [(2, 11.8, 13.6), (4, 18.9, 24.3), (8, 27.2, 39.8)]),
            (DecodePlacement::AnchorFirst, [(2, 13.9, 14.8), (4, 25.1, 28.2), (8, 42.0, 51.4)]),
            (DecodePlacement::AnchorShared, [(2, 14.7, 15.2), (4, 29.4, 30.3), (8, 51.7, 60.6)]),
            (DecodePlacement::Overlapped, [(2, 15.6, 15.6), (4, 31.1, 31.1), (8, 51.7, 62.2)]),
        ];
        for (decode, rows) in table {
            for (ranks, slow, fast) in rows {
                for (rate, want) in [(175.0, slow), (400.0, fast)] {
                    let got = fps(ranks, rate, decode);
                    assert!(
                        (got / want - 1.0).abs() < 0.03,
                        "{decode} on {ranks} at {rate}: got {got:.1}, expected {want}"
                    );
                }
            }
        }
        let all_ranks = fps(8, 175.0, DecodePlacement::AllRanks);
        assert!((all_ranks / 53.6 - 1.0).abs() < 0.03, "{all_ranks:.1}");
    }

    #[test]
    fn invalid_placements_are_not_offered() {
        let alone = MediaCosts::from_chunk(3, 9.0, 1.0, true, None);
        let fits = |s: &MediaCosts| {
            DecodePlacement::ALL.into_iter().filter(|d| d.is_valid_for(s)).collect::<Vec<_>>()
        };
        assert_eq!(
            fits(&alone),
            [DecodePlacement::OnMesh, DecodePlacement::Serial, DecodePlacement::AnchorFirst]
        );
        let uncoupled = MediaCosts { coupled: false, shardable: Some(0.9), ..alone };
        assert_eq!(
            fits(&uncoupled),
            [DecodePlacement::OnMesh, DecodePlacement::AllRanks, DecodePlacement::Overlapped]
        );
        let none = MediaCosts::NONE;
        assert_eq!(stream_period(10.0, &none, &none.shared_times(4), DecodePlacement::OnMesh).ns, 10.0);
        let programs = MediaCosts {
            leader: Some(LeaderPixels { times: MediaTimes::default(), shares_cores: false }),
            ..uncoupled
        };
        assert_eq!(
            fits(&programs),
            [
                DecodePlacement::AllRanks,
                DecodePlacement::Replicas,
                DecodePlacement::LeaderCpu,
                DecodePlacement::Overlapped
            ]
        );
    }

    #[test]
    fn a_leader_decodes_beside_the_calls_unless_the_next_call_waits_or_the_cores_are_shared() {
        let times = MediaTimes { first_ns: 10.0, rest_ns: 20.0, encode_ns: 5.0 };
        let period = |coupled, shares_cores| {
            let leader = Some(LeaderPixels { times, shares_cores });
            let media = MediaCosts { leader, coupled, ..MediaCosts::from_chunk(3, 3.0, 1.0, coupled, None) };
            stream_period(50.0, &media, &media.device, DecodePlacement::LeaderCpu).ns
        };
        assert_eq!([period(false, false), period(false, true)], [50.0, 80.0]);
        assert_eq!([period(true, false), period(true, true)], [65.0, 85.0]);
    }

    #[test]
    fn the_rank_outside_can_be_the_bottleneck() {
        let media = MediaCosts::from_chunk(3, 30.0, 2.0, true, Some(1.0));
        let p = stream_period(10.0, &media, &media.shared_times(8), DecodePlacement::AnchorFirst);
        assert_eq!((p.ns, p.outside_busy), (32.0, 1.0));
    }
}
