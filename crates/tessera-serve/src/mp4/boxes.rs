//! The boxes of fragmented MP4, ISO/IEC 14496-12 and 14496-15.

use mp4_atom::{
    Avc1, Avcc, Dinf, Dref, Encode, Ftyp, Hdlr, Matrix, Mdat, Mdhd, Mdia, Mfhd, Minf, Moof, Moov, Mvex, Mvhd,
    Stbl, Stco, Stsd, Tfdt, Tfhd, Tkhd, Traf, Trak, Trex, Trun, TrunEntry, TrunSamples, Url, Visual, Vmhd,
};

/// The only track.
const TRACK: u32 = 1;
/// Flags of a sample that depends on no other, and of one that does.
const KEY_FLAGS: u32 = 0x0200_0000;
const DELTA_FLAGS: u32 = 0x0101_0000;
/// Bytes of the header of a box.
const BOX_HEADER_BYTES: usize = 8;

/// The parameters of a sequence and of its pictures, each a NAL unit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ParameterSets {
    pub(super) sequence: Vec<u8>,
    pub(super) picture: Vec<u8>,
}

/// A coded frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sample {
    pub(super) is_key: bool,
    /// NAL units, each behind its length.
    pub(super) bytes: Vec<u8>,
}

impl Sample {
    /// Adds a NAL unit; `None` if it is too long for its length field.
    pub(super) fn push_unit(&mut self, unit: &[u8]) -> Option<()> {
        self.bytes.extend(u32::try_from(unit.len()).ok()?.to_be_bytes());
        self.bytes.extend_from_slice(unit);
        Some(())
    }
}

/// Returns the initialisation segment of a video of this size and frame rate; `None` for parameters that are none.
pub(super) fn write_initialisation(
    sets: &ParameterSets,
    (width, height): (usize, usize),
    (frames_per, _): (u32, u32),
) -> Option<Vec<u8>> {
    let (width, height) = (u16::try_from(width).ok()?, u16::try_from(height).ok()?);
    let visual = Visual {
        data_reference_index: 1,
        width,
        height,
        compressor: "H.264".into(),
        depth: 24,
        ..Visual::default()
    };
    let avcc = Avcc::new(&sets.sequence, &sets.picture).ok()?;
    let codec =
        Avc1 { visual, avcc, btrt: None, colr: None, pasp: None, taic: None, fiel: None, spatial: None };
    let stbl =
        Stbl { stsd: Stsd { codecs: vec![codec.into()] }, stco: Some(Stco::default()), ..Stbl::default() };
    let minf = Minf {
        vmhd: Some(Vmhd::default()),
        dinf: Dinf { dref: Dref { entries: vec![Url::default().into()] } },
        stbl,
        ..Minf::default()
    };
    // The unit of time is one frame of the rate's numerator, so that a frame lasts its denominator.
    let mdhd = Mdhd { timescale: frames_per, language: "und".into(), ..Mdhd::default() };
    let hdlr = Hdlr { handler: b"vide".into(), name: "tessera".into() };
    let tkhd = Tkhd {
        track_id: TRACK,
        enabled: true,
        in_movie: true,
        matrix: Matrix::default(),
        width: width.into(),
        height: height.into(),
        ..Tkhd::default()
    };
    let moov = Moov {
        mvhd: Mvhd { timescale: frames_per, rate: 1.into(), next_track_id: TRACK + 1, ..Mvhd::default() },
        mvex: Some(Mvex {
            trex: vec![Trex { track_id: TRACK, default_sample_description_index: 1, ..Trex::default() }],
            ..Mvex::default()
        }),
        trak: vec![Trak { tkhd, mdia: Mdia { mdhd, hdlr, minf }, ..Trak::default() }],
        ..Moov::default()
    };
    let brands = [b"iso6".into(), b"mp41".into(), b"avc1".into()];
    let ftyp = Ftyp { major_brand: b"iso6".into(), minor_version: 0, compatible_brands: brands.into() };
    let mut bytes = Vec::new();
    ftyp.encode(&mut bytes).ok()?;
    moov.encode(&mut bytes).ok()?;
    Some(bytes)
}

/// Returns a fragment with samples that begin at a frame of the video.
pub(super) fn write_fragment(
    first_frame: u64,
    (_, frame_time): (u32, u32),
    samples: &[Sample],
) -> Option<Vec<u8>> {
    let entries = samples.iter().map(|sample| {
        Some(TrunEntry {
            duration: None,
            size: Some(u32::try_from(sample.bytes.len()).ok()?),
            flags: Some(if sample.is_key { KEY_FLAGS } else { DELTA_FLAGS }),
            cts: None,
        })
    });
    let entries = entries.collect::<Option<Vec<_>>>()?;
    let write_moof = |data_offset: usize| {
        let trun = Trun {
            data_offset: Some(i32::try_from(data_offset).ok()?),
            samples: TrunSamples::Explicit(entries.clone()),
        };
        let moof = Moof {
            // Nothing depends on the value; it only has to grow.
            mfhd: Mfhd { sequence_number: (first_frame as u32).wrapping_add(1) },
            traf: vec![Traf {
                tfhd: Tfhd {
                    track_id: TRACK,
                    default_sample_duration: Some(frame_time),
                    default_base_is_moof: true,
                    ..Tfhd::default()
                },
                tfdt: Some(Tfdt { base_media_decode_time: first_frame * u64::from(frame_time) }),
                trun: vec![trun],
                ..Traf::default()
            }],
        };
        let mut bytes = Vec::new();
        moof.encode(&mut bytes).ok()?;
        Some(bytes)
    };
    // The samples stand behind the box that states where they stand; its length does not depend on the value.
    let length = write_moof(0)?.len();
    let mut bytes = write_moof(length + BOX_HEADER_BYTES)?;
    let data = samples.iter().flat_map(|sample| sample.bytes.iter().copied()).collect();
    Mdat { data }.encode(&mut bytes).ok()?;
    Some(bytes)
}
