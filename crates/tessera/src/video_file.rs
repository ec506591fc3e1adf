//! Reads the frames of an input video: a folder of PNGs, raw RGB, or YUV4MPEG2, from a file or a named pipe.
//!
//! `docs/guides/video-to-video.md` states the formats.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use tessera_base::Diagnostic;
use tessera_models::VideoModel;

use crate::codes::T0079;
use crate::rgb::from_rgb;

/// First bytes of a YUV4MPEG2 file.
const Y4M_MAGIC: &str = "YUV4MPEG2";

/// Maximum length of a header line of YUV4MPEG2, in bytes.
const HEADER_MAX: u64 = 1024;

/// Largest difference of two frame rates that count as equal.
const FPS_TOLERANCE: f64 = 1e-3;

/// An open input video, read one frame after another.
pub(crate) struct VideoFile {
    path: PathBuf,
    frames: Frames,
    width: usize,
    height: usize,
    /// Frames read so far.
    read: u64,
}

enum Frames {
    /// Files that are left, in order of their names.
    Pngs(std::vec::IntoIter<PathBuf>),
    Raw(BufReader<File>),
    Y4m(BufReader<File>, Chroma),
}

/// How many chroma values a frame of YUV4MPEG2 has.
#[derive(Clone, Copy, PartialEq)]
enum Chroma {
    /// One for each pixel.
    Full,
    /// One for each square of four pixels.
    Quarter,
}

impl VideoFile {
    /// Opens a video and compares what it states about itself with the stream. Opening a named pipe waits
    /// for its writer.
    ///
    /// # Errors
    /// T0079 with the path.
    pub(crate) fn open(path: &Path, video: &VideoModel) -> Result<VideoFile, Diagnostic> {
        let (width, height) = (video.stream.width as usize, video.stream.height as usize);
        let frames = if path.is_dir() { list_pngs(path)? } else { open_file(path, video)? };
        Ok(VideoFile { path: path.to_path_buf(), frames, width, height, read: 0 })
    }

    /// Checks that a video on disk has the frames of a stream. A named pipe cannot be checked: what is read
    /// from it is gone.
    ///
    /// # Errors
    /// T0079 with both numbers.
    pub(crate) fn check(path: &Path, video: &VideoModel, needed: u64, chunks: u32) -> Result<(), Diagnostic> {
        let about = std::fs::metadata(path).map_err(|e| unusable(path, format!("cannot be read: {e}")))?;
        if !about.is_dir() && !about.is_file() {
            return Ok(());
        }
        let mut file = VideoFile::open(path, video)?;
        let frames = match &mut file.frames {
            Frames::Pngs(files) => {
                let frames = files.len() as u64;
                // The first picture shows whether the size fits.
                file.next_frame()?;
                frames
            }
            Frames::Raw(_) => about.len() / (file.width * file.height * 3) as u64,
            Frames::Y4m(..) => {
                let mut frames = 0;
                while frames < needed && file.next_frame()?.is_some() {
                    frames += 1;
                }
                frames
            }
        };
        if frames >= needed {
            return Ok(());
        }
        let first = video.stream.first_chunk_frames();
        let whole = if frames < first { 0 } else { 1 + (frames - first) / video.stream.frames_per_chunk() };
        let hint = match whole {
            0 => format!("a chunk needs {first} frames: give a longer video"),
            whole => format!("give --chunks {whole} or a longer video"),
        };
        Err(unusable(path, format!("ends early: it has {frames} frames, {chunks} chunks need {needed}"))
            .with_hint(hint))
    }

    /// Reads the next frame [height, width, 3] as values in [−1, 1]; `None` at the end of the video.
    ///
    /// # Errors
    /// T0079 for a frame of another size, or one that ends early.
    pub(crate) fn next_frame(&mut self) -> Result<Option<Vec<f32>>, Diagnostic> {
        let (pixels, read) = (self.width * self.height, self.read);
        let rgb = match &mut self.frames {
            Frames::Pngs(files) => match files.next() {
                None => return Ok(None),
                Some(file) => read_png(&file, [self.width, self.height])?,
            },
            Frames::Raw(file) => {
                let mut rgb = vec![0; pixels * 3];
                match fill(file, &mut rgb) {
                    Ok(0) => return Ok(None),
                    Ok(n) if n == rgb.len() => rgb,
                    Ok(n) => {
                        let message = format!("ends within frame {read}: {n} of its {} bytes", rgb.len());
                        return Err(unusable(&self.path, message)
                            .with_hint(format!("write {} bytes of RGB for each frame", rgb.len())));
                    }
                    Err(e) => return Err(unusable(&self.path, format!("frame {read} cannot be read: {e}"))),
                }
            }
            Frames::Y4m(file, chroma) => match read_y4m_frame(file, *chroma, [self.width, self.height]) {
                Ok(None) => return Ok(None),
                Ok(Some(rgb)) => rgb,
                Err(why) => return Err(unusable(&self.path, format!("frame {read} {why}"))),
            },
        };
        self.read += 1;
        Ok(Some(from_rgb(&rgb).collect()))
    }
}

fn unusable(path: &Path, why: String) -> Diagnostic {
    Diagnostic::error(&T0079, format!("the video {} {why}", path.display()))
}

/// Describes a picture of another size, with the sizes to which it or the plan can be changed.
fn describe_size(path: &Path, [width, height]: [u64; 2], video: &VideoModel) -> Diagnostic {
    let s = &video.stream;
    let [w, h] = s.nearest_size(&video.wan, [width, height]);
    unusable(
        path,
        format!("has pictures of {width}×{height} pixels, the stream has {}×{}", s.width, s.height),
    )
    .with_hint(format!(
        "scale the video to {}×{}, or plan for {w}×{h}, the nearest size that the model can have",
        s.width, s.height
    ))
}

fn list_pngs(folder: &Path) -> Result<Frames, Diagnostic> {
    let list = std::fs::read_dir(folder).map_err(|e| unusable(folder, format!("cannot be read: {e}")))?;
    let mut files: Vec<PathBuf> = list
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("png")))
        .collect();
    files.sort();
    if files.is_empty() {
        return Err(unusable(folder, "is a folder without a PNG".into())
            .with_hint("name the frames so that their names are in order, such as 000001.png"));
    }
    Ok(Frames::Pngs(files.into_iter()))
}

fn open_file(path: &Path, video: &VideoModel) -> Result<Frames, Diagnostic> {
    let unreadable = |e: std::io::Error| unusable(path, format!("cannot be read: {e}"));
    let mut file = BufReader::new(File::open(path).map_err(unreadable)?);
    if !file.fill_buf().map_err(unreadable)?.starts_with(Y4M_MAGIC.as_bytes()) {
        return Ok(Frames::Raw(file));
    }
    let line = read_line(&mut file).map_err(unreadable)?;
    let (mut size, mut chroma) = ([0; 2], Some(Chroma::Quarter));
    for field in line.split(' ').skip(1) {
        let Some((key, value)) = field.split_at_checked(1) else { continue };
        match key {
            "W" => size[0] = value.parse().unwrap_or(0),
            "H" => size[1] = value.parse().unwrap_or(0),
            "F" => check_rate(path, value, video.stream.fps)?,
            "C" if value == "444" => chroma = Some(Chroma::Full),
            "C" if ["420", "420jpeg", "420mpeg2", "420paldv"].contains(&value) => {
                chroma = Some(Chroma::Quarter);
            }
            "C" => chroma = None,
            _ => {}
        }
    }
    if size != [video.stream.width, video.stream.height] {
        return Err(describe_size(path, size, video));
    }
    let Some(chroma) = chroma else {
        return Err(unusable(path, format!("has another pixel format: `{line}`"))
            .with_hint("write 8-bit YUV 4:4:4 or 4:2:0, such as ffmpeg -pix_fmt yuv444p"));
    };
    Ok(Frames::Y4m(file, chroma))
}

fn check_rate(path: &Path, text: &str, fps: f64) -> Result<(), Diagnostic> {
    let number = |s: &str| s.parse::<f64>().ok();
    let found = text.split_once(':').and_then(|(n, d)| Some(number(n)? / number(d)?));
    match found {
        Some(found) if (found - fps).abs() > FPS_TOLERANCE => {
            Err(unusable(path, format!("has {found:.3} frames per second, the stream {fps}"))
                .with_hint(format!("convert it, such as with ffmpeg -r {fps}, or set video.fps")))
        }
        _ => Ok(()),
    }
}

fn read_line(file: &mut impl BufRead) -> std::io::Result<String> {
    let mut line = Vec::new();
    file.take(HEADER_MAX).read_until(b'\n', &mut line)?;
    Ok(String::from_utf8_lossy(&line).trim_end().to_string())
}

/// Reads until the buffer is full or the file ends, and returns the number of bytes.
fn fill(file: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled)
}

fn read_png(path: &Path, [width, height]: [usize; 2]) -> Result<Vec<u8>, Diagnostic> {
    let refuse = |e: String| unusable(path, e);
    let file = File::open(path).map_err(|e| refuse(format!("cannot be read: {e}")))?;
    let mut decoder = png::Decoder::new(BufReader::new(file));
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(|e| refuse(format!("is no PNG: {e}")))?;
    let size = [reader.info().width as usize, reader.info().height as usize];
    if size != [width, height] {
        let [w, h] = size;
        return Err(refuse(format!("has {w}×{h} pixels, the stream has {width}×{height}"))
            .with_hint(format!("scale every picture to {width}×{height}")));
    }
    let mut bytes = vec![0; reader.output_buffer_size().unwrap_or(width * height * 4)];
    let info = reader.next_frame(&mut bytes).map_err(|e| refuse(format!("cannot be decoded: {e}")))?;
    bytes.truncate(info.buffer_size());
    Ok(match info.color_type {
        png::ColorType::Rgb => bytes,
        png::ColorType::Rgba => bytes.as_chunks::<4>().0.iter().flat_map(|p| [p[0], p[1], p[2]]).collect(),
        png::ColorType::GrayscaleAlpha => bytes.as_chunks::<2>().0.iter().flat_map(|p| [p[0]; 3]).collect(),
        png::ColorType::Grayscale | png::ColorType::Indexed => {
            bytes.into_iter().flat_map(|grey| [grey; 3]).collect()
        }
    })
}

/// Reads a frame of YUV4MPEG2 to RGB, by the BT.601 matrix in the limited range. `None` at the end.
fn read_y4m_frame(
    file: &mut BufReader<File>,
    chroma: Chroma,
    [width, height]: [usize; 2],
) -> Result<Option<Vec<u8>>, String> {
    let line = read_line(file).map_err(|e| format!("cannot be read: {e}"))?;
    if line.is_empty() {
        return Ok(None);
    }
    if !line.starts_with("FRAME") {
        return Err(format!("begins with `{line}`, not with FRAME"));
    }
    let step = if chroma == Chroma::Full { 1 } else { 2 };
    let (columns, plane) = (width.div_ceil(step), width.div_ceil(step) * height.div_ceil(step));
    let mut bytes = vec![0; width * height + 2 * plane];
    let read = fill(file, &mut bytes).map_err(|e| format!("cannot be read: {e}"))?;
    if read < bytes.len() {
        return Err(format!("ends early: {read} of its {} bytes", bytes.len()));
    }
    let (luma, chromas) = bytes.split_at(width * height);
    let pixel = |at: usize| {
        let cell = at / width / step * columns + at % width / step;
        let y = 255.0 / 219.0 * (f32::from(luma[at]) - 16.0);
        let [cb, cr] = [cell, plane + cell].map(|i| 255.0 / 224.0 * (f32::from(chromas[i]) - 128.0));
        [y + 1.402 * cr, y - 0.344_136 * cb - 0.714_136 * cr, y + 1.772 * cb].map(|v| v.round() as u8)
    };
    Ok(Some((0..width * height).flat_map(pixel).collect()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use tessera_report::apng::png_frame;
    use tessera_report::raw_video::RawFormat;

    use super::*;
    use crate::model::{Model, Overrides};

    /// A stream of 80 × 48 pixels at 24 frames per second.
    fn model() -> VideoModel {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/wan-odd");
        Model::open(&dir, &Overrides::default()).unwrap().video
    }

    /// Frames of smooth colours, which survive a conversion to YUV.
    fn frames(count: usize) -> Vec<Vec<u8>> {
        let value = |f: usize, i: usize| (40 + (f * 29 + i / 3 % 80 * 2 + i % 3 * 31) % 170) as u8;
        (0..count).map(|f| (0..80 * 48 * 3).map(|i| value(f, i)).collect()).collect()
    }

    fn read_all(path: &Path) -> Result<Vec<Vec<u8>>, Diagnostic> {
        let mut video = VideoFile::open(path, &model())?;
        let mut out = Vec::new();
        while let Some(frame) = video.next_frame()? {
            out.push(frame.into_iter().map(|v| ((v + 1.0) * 127.5).round() as u8).collect());
        }
        Ok(out)
    }

    fn write_y4m(path: &Path, frames: &[Vec<u8>], size: (u32, u32), fps: u32) {
        let mut bytes = RawFormat::Y4m.header(size, (fps, 1));
        frames.iter().for_each(|f| bytes.extend(&*RawFormat::Y4m.encode_frame(f)));
        std::fs::write(path, bytes).unwrap();
    }

    #[test]
    fn every_format_returns_the_frames_that_were_written() {
        let dir = tempfile::tempdir().unwrap();
        let frames = frames(3);
        let (raw, y4m, pngs) = (dir.path().join("v.rgb"), dir.path().join("v.y4m"), dir.path().join("pngs"));
        std::fs::write(&raw, frames.concat()).unwrap();
        assert!(read_all(&raw).unwrap() == frames);
        std::fs::create_dir(&pngs).unwrap();
        for (i, frame) in frames.iter().enumerate() {
            std::fs::write(pngs.join(format!("{i:06}.png")), png_frame(frame, 80, 48).unwrap()).unwrap();
        }
        std::fs::write(pngs.join("notes.txt"), "no frame").unwrap();
        assert!(read_all(&pngs).unwrap() == frames);
        write_y4m(&y4m, &frames, (80, 48), 24);
        let found = read_all(&y4m).unwrap();
        let far = found.concat().iter().zip(frames.concat()).map(|(a, b)| a.abs_diff(b)).max();
        assert!(found.len() == 3 && far.is_some_and(|far| far <= 3), "{far:?}");
    }

    #[test]
    fn chroma_of_four_pixels_is_spread_over_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.y4m");
        let mut file = File::create(&path).unwrap();
        file.write_all(b"YUV4MPEG2 W80 H48 F24:1 C420jpeg\nFRAME\n").unwrap();
        let (luma, cb, cr) = (vec![128; 80 * 48], vec![128; 40 * 24], vec![200; 40 * 24]);
        file.write_all(&[luma, cb, cr].concat()).unwrap();
        let frame = read_all(&path).unwrap().remove(0);
        assert!(frame.as_chunks::<3>().0.iter().all(|p| *p == frame[..3]) && frame[0] > frame[1]);
    }

    #[test]
    fn a_video_that_does_not_fit_is_refused_in_plain_words() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v");
        let refusal = |needed: u64| VideoFile::check(&path, &model(), needed, 9).unwrap_err();
        let says = |d: &Diagnostic, text: &str| {
            let all = format!("{} {}", d.message, d.hint.as_deref().unwrap_or_default());
            assert!(d.code.id == "T0079" && all.contains(text), "{all}");
        };
        says(&refusal(1), "cannot be read");
        write_y4m(&path, &frames(1), (82, 48), 24);
        says(&refusal(1), "82×48 pixels, the stream has 80×48");
        says(&refusal(1), "plan for 80×48");
        write_y4m(&path, &frames(1), (80, 48), 30);
        says(&refusal(1), "30.000 frames per second, the stream 24");
        write_y4m(&path, &frames(13), (80, 48), 24);
        says(&refusal(24), "13 frames, 9 chunks need 24 give --chunks 1 or");
        std::fs::write(&path, b"YUV4MPEG2 W80 H48 F24:1 C422\n").unwrap();
        says(&refusal(1), "another pixel format");
        std::fs::write(&path, &frames(2).concat()[1..]).unwrap();
        let mut video = VideoFile::open(&path, &model()).unwrap();
        video.next_frame().unwrap();
        says(&video.next_frame().unwrap_err(), "ends within frame 1");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        says(&refusal(1), "without a PNG");
        std::fs::write(path.join("a.png"), png_frame(&[7; 16 * 16 * 3], 16, 16).unwrap()).unwrap();
        says(&refusal(1), "16×16 pixels, the stream has 80×48");
    }
}
