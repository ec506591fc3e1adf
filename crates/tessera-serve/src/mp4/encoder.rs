//! H.264 of the frames of a chunk.

use axum::body::Bytes;
use openh264::OpenH264API;
use openh264::encoder::{
    Complexity, Encoder, EncoderConfig, FrameRate, FrameType, RateControlMode, VuiConfig,
};
use openh264::formats::{RgbSliceU8, YUVBuffer};

use super::boxes::{ParameterSets, Sample, write_fragment, write_initialisation};
use crate::hex::to_hex;

/// Types of NAL units that stand in the initialisation segment.
const SEQUENCE_PARAMETERS: u8 = 7;
const PICTURE_PARAMETERS: u8 = 8;

/// Encodes chunks of one size.
#[derive(Debug)]
pub(crate) struct Mp4Encoder {
    size: (usize, usize),
    frame_rate: (u32, u32),
    media_type: String,
    initialisation: Bytes,
}

impl Mp4Encoder {
    /// Creates an encoder of pictures of this width and height, at so many frames in so many seconds; `None` if H.264 with
    /// colours at half the resolution has no such pictures.
    pub(crate) fn new(size: (usize, usize), frame_rate: (u32, u32)) -> Option<Mp4Encoder> {
        if !size.0.is_multiple_of(2) || !size.1.is_multiple_of(2) || frame_rate.0 == 0 {
            return None;
        }
        // The parameters depend on the size alone, so those of a black frame hold for every chunk.
        let black = vec![0; size.0 * size.1 * 3];
        let (sets, _) = encode_frames(size, frame_rate, std::iter::once(&*black))?;
        let initialisation = write_initialisation(&sets, size, frame_rate)?.into();
        let profile = to_hex(sets.sequence.get(1..4)?);
        let media_type = format!("video/mp4; codecs=\"avc1.{profile}\"");
        Some(Mp4Encoder { size, frame_rate, media_type, initialisation })
    }

    /// Returns the media type, with the codec as RFC 6381 writes it.
    pub(crate) fn media_type(&self) -> &str {
        &self.media_type
    }

    /// Returns the initialisation segment, which a player needs before the first fragment.
    pub(crate) fn initialisation(&self) -> &Bytes {
        &self.initialisation
    }

    /// Returns the fragment of a chunk whose first frame has this number in the video; `None` if the encoder fails. Frames
    /// are bytes of RGB.
    pub(crate) fn encode_chunk<'a>(
        &self,
        first_frame: u64,
        frames: impl Iterator<Item = &'a [u8]>,
    ) -> Option<Bytes> {
        let (_, samples) = encode_frames(self.size, self.frame_rate, frames)?;
        write_fragment(first_frame, self.frame_rate, &samples).map(Bytes::from)
    }
}

/// Encodes frames with an encoder of their own. It costs less than a frame to create, and a chunk never depends on one that a
/// client has not got.
fn encode_frames<'a>(
    size: (usize, usize),
    (frames_per, seconds): (u32, u32),
    frames: impl Iterator<Item = &'a [u8]>,
) -> Option<(ParameterSets, Vec<Sample>)> {
    let rate = frames_per as f32 / seconds.max(1) as f32;
    // A constant quantizer: a rate control would give the first frames of each chunk the bits of a start. One thread, because the
    // others of this machine may be ranks.
    let config = EncoderConfig::new()
        .rate_control_mode(RateControlMode::Off)
        .max_frame_rate(FrameRate::from_hz(rate))
        .skip_frames(false)
        .scene_change_detect(false)
        .complexity(Complexity::Low)
        .num_threads(1)
        .vui(VuiConfig::bt601());
    let mut encoder = Encoder::with_api_config(OpenH264API::from_source(), config).ok()?;
    let mut sets = ParameterSets::default();
    let mut samples = Vec::new();
    for rgb in frames {
        let picture = YUVBuffer::from_rgb8_source(RgbSliceU8::new(rgb, size));
        let coded = encoder.encode(&picture).ok()?;
        let mut sample = Sample { is_key: coded.frame_type() == FrameType::IDR, bytes: Vec::new() };
        for layer in (0..coded.num_layers()).filter_map(|i| coded.layer(i)) {
            for unit in (0..layer.nal_count()).filter_map(|i| layer.nal_unit(i)).map(strip_start_code) {
                match unit.first()? & 0x1f {
                    SEQUENCE_PARAMETERS => sets.sequence = unit.to_vec(),
                    PICTURE_PARAMETERS => sets.picture = unit.to_vec(),
                    _ => sample.push_unit(unit)?,
                }
            }
        }
        samples.push(sample);
    }
    Some((sets, samples))
}

/// Returns a NAL unit without the code in front that separates units in a stream of bytes.
fn strip_start_code(unit: &[u8]) -> &[u8] {
    let zeros = unit.iter().take_while(|byte| **byte == 0).count();
    unit.get(zeros + 1..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use mp4_atom::{Decode, Ftyp, Mdat, Moof, Moov, TrunSamples};
    use openh264::decoder::Decoder;
    use openh264::formats::YUVSource;

    use super::*;

    const SIZE: (usize, usize) = (70, 46);

    /// A picture of one colour, which becomes brighter with each frame.
    fn picture(frame: u8) -> Vec<u8> {
        [40 + 12 * frame, 60, 90].repeat(SIZE.0 * SIZE.1)
    }

    #[test]
    fn a_fragment_holds_the_frames_of_its_chunk_at_their_times() {
        let encoder = Mp4Encoder::new(SIZE, (24_000, 1001)).unwrap();
        assert!(encoder.media_type().starts_with("video/mp4; codecs=\"avc1."), "{}", encoder.media_type());
        let mut bytes = &encoder.initialisation()[..];
        assert_eq!(Ftyp::decode(&mut bytes).unwrap().major_brand, b"iso6".into());
        let moov = Moov::decode(&mut bytes).unwrap();
        assert!(bytes.is_empty());
        assert_eq!(moov.trak[0].mdia.mdhd.timescale, 24_000);
        let pictures: Vec<Vec<u8>> = (0..5).map(picture).collect();
        let fragment = encoder.encode_chunk(36, pictures.iter().map(Vec::as_slice)).unwrap();
        let mut bytes = &fragment[..];
        let moof = Moof::decode(&mut bytes).unwrap();
        let moof_bytes = fragment.len() - bytes.len();
        let mdat = Mdat::decode(&mut bytes).unwrap();
        let part = &moof.traf[0];
        assert_eq!(part.tfdt.as_ref().unwrap().base_media_decode_time, 36 * 1001);
        assert_eq!(part.tfhd.default_sample_duration, Some(1001));
        assert_eq!(part.trun[0].data_offset, i32::try_from(moof_bytes + 8).ok());
        let TrunSamples::Explicit(samples) = &part.trun[0].samples else { panic!("{:?}", part.trun) };
        assert_eq!(samples.len(), 5);
        // The first sample alone is a key frame.
        assert!(samples.iter().enumerate().all(|(i, s)| (s.flags.unwrap() & 0x1_0000 == 0) == (i == 0)));
        let sizes: u32 = samples.iter().map(|sample| sample.size.unwrap()).sum();
        assert_eq!(sizes as usize, mdat.data.len());
    }

    #[test]
    fn every_chunk_decodes_without_the_one_before() {
        let encoder = Mp4Encoder::new(SIZE, (16, 1)).unwrap();
        let moov = Moov::decode(&mut &encoder.initialisation()[28..]).unwrap();
        let mp4_atom::Codec::Avc1(avc1) = &moov.trak[0].mdia.minf.stbl.stsd.codecs[0] else {
            panic!("{moov:?}")
        };
        let start = [0, 0, 0, 1];
        for chunk in 0..2_u8 {
            let pictures: Vec<Vec<u8>> = (0..4).map(|frame| picture(chunk * 4 + frame)).collect();
            let fragment = encoder.encode_chunk(0, pictures.iter().map(Vec::as_slice)).unwrap();
            let mut bytes = &fragment[..];
            Moof::decode(&mut bytes).unwrap();
            let data = Mdat::decode(&mut bytes).unwrap().data;
            let sets = [&avc1.avcc.sequence_parameter_sets[0][..], &avc1.avcc.picture_parameter_sets[0]];
            let mut stream = sets.map(|set| [&start[..], set].concat()).concat();
            let mut left = &data[..];
            while let Some((length, rest)) = left.split_first_chunk::<4>() {
                let (unit, rest) = rest.split_at(u32::from_be_bytes(*length) as usize);
                stream.extend([&start[..], unit].concat());
                left = rest;
            }
            let mut decoder = Decoder::new().unwrap();
            let mut levels = Vec::new();
            for unit in openh264::nal_units(&stream) {
                if let Some(decoded) = decoder.decode(unit).unwrap() {
                    assert_eq!(decoded.dimensions(), SIZE);
                    levels.push(i32::from(decoded.y()[0]));
                }
            }
            let rest = decoder.flush_remaining().unwrap();
            levels.extend(rest.iter().map(|decoded| i32::from(decoded.y()[0])));
            let luma = |rgb: &[u8]| {
                let [r, g, b] = [0, 1, 2].map(|c| f64::from(rgb[c]));
                (16.0 + (65.738 * r + 129.057 * g + 25.064 * b) / 256.0) as i32
            };
            let expected: Vec<i32> = pictures.iter().map(|rgb| luma(rgb)).collect();
            assert_eq!(levels.len(), expected.len());
            assert!(levels.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 2), "{levels:?} {expected:?}");
        }
    }

    #[test]
    fn pictures_of_odd_size_have_no_encoder() {
        assert!(Mp4Encoder::new((71, 46), (24, 1)).is_none());
        assert!(Mp4Encoder::new((70, 45), (24, 1)).is_none());
    }
}
