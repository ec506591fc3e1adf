//! From a call and the work before and after it to the period of a stream: who decodes, and what waits for it.
//!
//! The leader's process decodes on a thread of its own beside its rank's engine, so the device decides what waits. On a rank of
//! the mesh decode and phases need the same one, which works off either before the other, in the order in which they were
//! asked for: the anchor before a call, the rest before that call's first op, while the other ranks wait in their first
//! collective. A modelled run does the same, op by op; what kernels of both could fill of each other's gaps is not counted.

use std::fmt;

/// What surrounds the generator in a stream: decoding a chunk to pixels, and encoding what the next chunk needs of it.
/// Times are of one device that does all of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Studio {
    /// Decode of a chunk's first latent, which is all that the next chunk's anchor waits for, in nanoseconds.
    pub first_ns: f64,
    /// Decode of its other latents, in nanoseconds.
    pub rest_ns: f64,
    /// Encode of the anchor, in nanoseconds; counts only where the chunks are coupled.
    pub encode_ns: f64,
    /// Whether the next chunk's context needs pixels of this one.
    pub coupled: bool,
    /// Share of an even split that decode and encode keep when ranks share them (halos, rows that do not divide); none
    /// where only one rank can do them.
    pub shardable: Option<f64>,
}

impl Studio {
    /// No decoder: the stream ends with latents.
    pub const NONE: Studio =
        Studio { first_ns: 0.0, rest_ns: 0.0, encode_ns: 0.0, coupled: false, shardable: None };

    /// Decode of a chunk of `latents` latents in `decode_ns`, each alike, with an encode of `encode_ns`.
    #[must_use]
    pub fn of(latents: u64, decode_ns: f64, encode_ns: f64, coupled: bool, shardable: Option<f64>) -> Studio {
        let first_ns = decode_ns / latents.max(1) as f64;
        Studio { first_ns, rest_ns: decode_ns - first_ns, encode_ns, coupled, shardable }
    }

    /// Decode of a whole chunk.
    #[must_use]
    pub fn decode_ns(&self) -> f64 {
        self.first_ns + self.rest_ns
    }

    fn anchor_ns(&self) -> f64 {
        if self.coupled { self.first_ns + self.encode_ns } else { 0.0 }
    }

    /// Decode that is over when the next call begins.
    fn before_ns(&self) -> f64 {
        if self.coupled { self.first_ns } else { 0.0 }
    }

    fn all_ns(&self) -> f64 {
        self.decode_ns() + if self.coupled { self.encode_ns } else { 0.0 }
    }
}

/// Who decodes, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Decode {
    /// Rank 0 of the mesh, on the device on which it computes: the mesh waits for it.
    OnMesh,
    /// All ranks of the mesh share decode and encode, between two calls.
    AllHands,
    /// A rank outside the mesh, the whole chunk before the next one begins.
    Serial,
    /// A rank outside the mesh; the next chunk begins as soon as the first latent is decoded and encoded.
    AnchorFirst,
    /// The same, and the mesh shares the decode of the first latent and the encode. The rank outside decodes all, because
    /// the decoder's history is there.
    AnchorShared,
    /// A rank outside the mesh, beside the next chunk: nothing waits for pixels.
    Beside,
}

impl Decode {
    /// All ways.
    pub const ALL: [Decode; 6] = [
        Decode::OnMesh,
        Decode::AllHands,
        Decode::Serial,
        Decode::AnchorFirst,
        Decode::AnchorShared,
        Decode::Beside,
    ];

    /// Spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["on_mesh", "all_hands", "serial", "anchor_first", "anchor_shared", "beside"][self as usize]
    }

    /// Ranks it takes outside the mesh.
    #[must_use]
    pub fn outside(self) -> u32 {
        u32::from(!matches!(self, Decode::OnMesh | Decode::AllHands))
    }

    /// Whether ranks share the decoder's work, which an executor must be able to do.
    #[must_use]
    pub fn shares(self) -> bool {
        matches!(self, Decode::AllHands | Decode::AnchorShared)
    }

    /// Whether it is right, and possible, for a studio.
    #[must_use]
    pub fn fits(self, studio: &Studio) -> bool {
        let possible = studio.shardable.is_some() || !self.shares();
        let right = match self {
            Decode::OnMesh | Decode::AllHands => true,
            Decode::Serial | Decode::AnchorFirst | Decode::AnchorShared => studio.coupled,
            Decode::Beside => !studio.coupled,
        };
        possible && right
    }
}

impl fmt::Display for Decode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The pace of a stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Period {
    /// From one chunk to the next, in nanoseconds.
    pub ns: f64,
    /// From the beginning of a call to the last pixel of its chunk, in nanoseconds.
    pub latency_ns: f64,
    /// Share of the period in which a rank of the mesh generates.
    pub mesh_busy: f64,
    /// Share of the period in which the rank outside works; 0 without one.
    pub outside_busy: f64,
}

/// The period of a mesh of `ranks` that generates a chunk in `generate_ns`.
#[must_use]
pub fn period(generate_ns: f64, ranks: u32, studio: &Studio, decode: Decode) -> Period {
    let share = studio.shardable.unwrap_or(1.0).clamp(f64::MIN_POSITIVE, 1.0) * f64::from(ranks.max(1));
    let (all, anchor, pixels) = (studio.all_ns(), studio.anchor_ns(), studio.decode_ns());
    let (ns, latency_ns, outside) = match decode {
        // The call is under way and waits for what is left of the chunk before; the encode comes before the pixels.
        Decode::OnMesh => (generate_ns + all, generate_ns + all + pixels - studio.before_ns(), 0.0),
        Decode::AllHands => (generate_ns + all / share, generate_ns + pixels / share, 0.0),
        Decode::Serial => (generate_ns + all, generate_ns + pixels, all),
        Decode::AnchorFirst => ((generate_ns + anchor).max(all), generate_ns + all, all),
        Decode::AnchorShared => {
            ((generate_ns + anchor / share).max(pixels), generate_ns + pixels.max(anchor / share), pixels)
        }
        Decode::Beside => (generate_ns.max(pixels), generate_ns + pixels, pixels),
    };
    let of = |busy: f64| if ns > 0.0 { busy / ns } else { 0.0 };
    Period { ns, latency_ns, mesh_busy: of(generate_ns), outside_busy: of(outside) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A 14B generator of 731 TFLOP a chunk at 60 % of 790 TFLOP/s per device, a decoder of 40.65 and an encoder of 2.73
    /// TFLOP at a rate in TFLOP/s: frames per second of twelve frames a chunk.
    fn fps(ranks: u32, rate: f64, decode: Decode) -> f64 {
        let ms = |tflop: f64, rate: f64| tflop / rate * 1e9;
        let coupled = decode != Decode::Beside;
        let studio = Studio::of(3, ms(40.65, rate), ms(2.73, rate), coupled, Some(1.0));
        assert!(decode.fits(&studio));
        12.0 / (period(ms(731.0, 0.6 * 790.0) / f64::from(ranks), ranks, &studio, decode).ns * 1e-9)
    }

    #[test]
    fn periods_of_a_coupled_14b_stream() {
        // Ranks of the mesh, decode at 175 and at 400 TFLOP/s: derived figures for 480×832.
        let table = [
            (Decode::Serial, [(2, 11.8, 13.6), (4, 18.9, 24.3), (8, 27.2, 39.8)]),
            (Decode::AnchorFirst, [(2, 13.9, 14.8), (4, 25.1, 28.2), (8, 42.0, 51.4)]),
            (Decode::AnchorShared, [(2, 14.7, 15.2), (4, 29.4, 30.3), (8, 51.7, 60.6)]),
            (Decode::Beside, [(2, 15.6, 15.6), (4, 31.1, 31.1), (8, 51.7, 62.2)]),
        ];
        for (decode, rows) in table {
            for (ranks, slow, fast) in rows {
                for (rate, want) in [(175.0, slow), (400.0, fast)] {
                    let got = fps(ranks, rate, decode);
                    assert!(
                        (got / want - 1.0).abs() < 0.03,
                        "{decode} on {ranks} at {rate}: {got:.1}, not {want}"
                    );
                }
            }
        }
        let all_hands = fps(8, 175.0, Decode::AllHands);
        assert!((all_hands / 53.6 - 1.0).abs() < 0.03, "{all_hands:.1}");
    }

    #[test]
    fn what_cannot_be_is_not_offered() {
        let alone = Studio::of(3, 9.0, 1.0, true, None);
        let fits = |s: &Studio| Decode::ALL.into_iter().filter(|d| d.fits(s)).collect::<Vec<_>>();
        assert_eq!(fits(&alone), [Decode::OnMesh, Decode::Serial, Decode::AnchorFirst]);
        let uncoupled = Studio { coupled: false, shardable: Some(0.9), ..alone };
        assert_eq!(fits(&uncoupled), [Decode::OnMesh, Decode::AllHands, Decode::Beside]);
        assert_eq!(period(10.0, 4, &Studio::NONE, Decode::OnMesh).ns, 10.0);
    }

    #[test]
    fn the_rank_outside_can_be_the_slow_one() {
        let studio = Studio::of(3, 30.0, 2.0, true, Some(1.0));
        let p = period(10.0, 8, &studio, Decode::AnchorFirst);
        assert_eq!((p.ns, p.outside_busy), (32.0, 1.0));
    }
}
