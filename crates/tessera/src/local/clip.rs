//! Measures from pixels alone what a clip of the demo world shows.
//!
//! Everything here comes from models/demo/palette.json; the model, its latents and its training
//! code are not used. The plane is a torus; a position is the centre of the object, in pixels.

use std::f64::consts::TAU;
use std::path::Path;

use serde_json::Value;

pub const COLORS: [&str; 4] = ["red", "green", "blue", "yellow"];
pub const SHAPES: [&str; 3] = ["circle", "square", "triangle"];
pub const DIRECTIONS: [&str; 4] = ["left", "right", "up", "down"];

/// Squared distance on [−1, 1]³ beyond which a pixel does not belong to the background.
const FOREGROUND_DISTANCE: f32 = 0.15;
/// Frames of a chunk in which the shape is searched.
const SAMPLED_FRAMES: [usize; 3] = [0, 6, 11];

type Rgb = [f32; 3];

/// Indices into [`COLORS`], [`SHAPES`], [`DIRECTIONS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prompt {
    pub color: usize,
    pub shape: usize,
    pub direction: usize,
}

impl Prompt {
    pub const COUNT: usize = 48;

    pub fn nth(i: usize) -> Prompt {
        Prompt { color: i / 12, shape: i / 4 % 3, direction: i % 4 }
    }

    pub fn text(self) -> String {
        let (c, s, d) = (COLORS[self.color], SHAPES[self.shape], DIRECTIONS[self.direction]);
        format!("a {c} {s} moves {d}")
    }
}

/// The measured object and scene of a chunk.
#[derive(Debug, Clone, Copy)]
pub struct ClipMeasurement {
    pub shown: Prompt,
    /// Fraction of the object's pixels, without its outline, that are nearest to the colour.
    pub purity: f64,
    /// Intersection over union with the shape, averaged over the sampled frames.
    pub overlap: f64,
    /// Mean movement of the centroid in pixels per frame, x and y.
    pub step: [f64; 2],
    /// Maximum deviation of the centroid from that movement between two frames, in pixels.
    pub unsteady: f64,
    /// Index of the background.
    pub background: usize,
    /// Centre in the first frame of the nearest valid clip.
    pub position: [i64; 2],
    /// PSNR against that clip in decibels, for a peak of 2.
    pub psnr: f64,
}

impl ClipMeasurement {
    /// Describes what is wrong with the chunk as a clip of `asked`; empty for a valid clip.
    pub fn faults(&self, world: &World, asked: Prompt) -> Vec<String> {
        let mut found = Vec::new();
        if self.shown != asked {
            found.push(format!("shows {}", self.shown.text()));
        }
        let want = world.step_per_frame(asked.direction);
        if (0..2).any(|i| (self.step[i] - want[i] as f64).abs() > 0.25) || self.unsteady > 1.5 {
            found.push(format!("moves {:.2?} a frame, {:.2} unsteady", self.step, self.unsteady));
        }
        if self.purity < 0.95 {
            found.push(format!("{:.3} of its object has the colour", self.purity));
        }
        if self.overlap < 0.9 {
            found.push(format!("overlaps its shape by {:.3}", self.overlap));
        }
        if self.psnr < 25.0 {
            found.push(format!("{:.1} dB from a valid clip", self.psnr));
        }
        found
    }
}

/// The rendered palette.
pub struct World {
    pub size: usize,
    speed: i64,
    colors: Vec<Rgb>,
    directions: Vec<[i64; 2]>,
    /// Full frame of each background.
    backgrounds: Vec<Vec<Rgb>>,
    /// Coverage of each shape centred on pixel corner (0, 0), wrapped.
    shapes: Vec<Vec<f32>>,
    /// Offset of the centroid of each shape's pixels from the shape's centre.
    offsets: Vec<[f64; 2]>,
}

impl World {
    pub fn open(palette: &Path) -> World {
        let spec: Value = serde_json::from_str(&std::fs::read_to_string(palette).unwrap()).unwrap();
        let size = spec["size"].as_u64().unwrap() as usize;
        let edge = number(&spec["edge"]);
        let shapes: Vec<Vec<f32>> =
            SHAPES.iter().map(|s| shape_coverage(s, &spec["shapes"][*s], edge, size)).collect();
        let offsets = shapes.iter().map(|s| centroid(size, |i| s[i] >= 0.5)).collect();
        World {
            size,
            speed: spec["speed"].as_i64().unwrap(),
            colors: COLORS.iter().map(|c| rgb(&spec["colors"][*c])).collect(),
            directions: DIRECTIONS
                .iter()
                .map(|d| [0, 1].map(|i| spec["directions"][*d][i].as_i64().unwrap()))
                .collect(),
            backgrounds: spec["backgrounds"]
                .as_array()
                .unwrap()
                .iter()
                .map(|b| render_background(b, size))
                .collect(),
            shapes,
            offsets,
        }
    }

    /// Returns the movement of the object in pixels per frame, x and y.
    pub fn step_per_frame(&self, direction: usize) -> [i64; 2] {
        self.directions[direction].map(|d| d * self.speed)
    }

    /// Returns the position of the object after `frames` frames.
    pub fn position_after(&self, position: [i64; 2], direction: usize, frames: i64) -> [i64; 2] {
        let step = self.step_per_frame(direction);
        [0, 1].map(|i| (position[i] + frames * step[i]).rem_euclid(self.size as i64))
    }

    /// Returns the larger distance of two positions along x and y, on the torus.
    pub fn max_axis_distance(&self, a: [i64; 2], b: [i64; 2]) -> i64 {
        (0..2).map(|i| wrap_torus((a[i] - b[i]) as f64, self.size).abs() as i64).max().unwrap()
    }

    /// Measures a clip with pixels [frames, y, x, 3] in [−1, 1].
    pub fn measure(&self, pixels: &[f32]) -> ClipMeasurement {
        let area = self.size * self.size;
        let pixels = pixels.as_chunks::<3>().0;
        let frames: Vec<&[Rgb]> = pixels.chunks_exact(area).collect();
        let background = self.nearest_background(&frames);
        let ground = &self.backgrounds[background];

        let mut votes = [0usize; COLORS.len()];
        for n in SAMPLED_FRAMES {
            let foreign: Vec<bool> =
                frames[n].iter().zip(ground).map(|(p, g)| distance(p, g) > FOREGROUND_DISTANCE).collect();
            for (_, p) in frames[n].iter().enumerate().filter(|(i, _)| self.is_interior(&foreign, *i)) {
                votes[argmin(self.colors.iter().map(|c| f64::from(distance(p, c))))] += 1;
            }
        }
        let color = argmin(votes.iter().map(|v| -(*v as f64)));
        let purity = votes[color] as f64 / votes.iter().sum::<usize>().max(1) as f64;

        let paint = self.colors[color];
        let masks: Vec<Vec<bool>> = frames
            .iter()
            .map(|f| f.iter().zip(ground).map(|(p, g)| distance(p, &paint) < distance(p, g)).collect())
            .collect();
        let centers: Vec<[f64; 2]> = masks.iter().map(|m| centroid(self.size, |i| m[i])).collect();
        let steps: Vec<[f64; 2]> =
            centers.windows(2).map(|w| [0, 1].map(|i| wrap_torus(w[1][i] - w[0][i], self.size))).collect();
        let step = [0, 1].map(|i| steps.iter().map(|s| s[i]).sum::<f64>() / steps.len() as f64);
        let unsteady =
            steps.iter().flat_map(|s| [s[0] - step[0], s[1] - step[1]]).map(f64::abs).fold(0.0, f64::max);
        let direction =
            argmin(self.directions.iter().map(|d| -(step[0] * d[0] as f64 + step[1] * d[1] as f64)));

        let fits: Vec<Vec<(f64, [i64; 2])>> = (0..SHAPES.len())
            .map(|s| SAMPLED_FRAMES.iter().map(|n| self.best_overlap(&masks[*n], s, centers[*n])).collect())
            .collect();
        let mean = |f: &[(f64, [i64; 2])]| f.iter().map(|(overlap, _)| overlap).sum::<f64>() / f.len() as f64;
        let overlaps: Vec<f64> = fits.iter().map(|f| mean(f)).collect();
        let shape = argmin(overlaps.iter().map(|o| -o));
        let shown = Prompt { color, shape, direction };

        // Each sampled frame implies a start position of the clip; the nearest of these clips
        // counts.
        let mut starts: Vec<[i64; 2]> = fits[shape]
            .iter()
            .zip(SAMPLED_FRAMES)
            .map(|((_, at), n)| self.position_after(*at, direction, -(n as i64)))
            .collect();
        starts.sort_unstable();
        starts.dedup();
        let (psnr, position) = starts
            .into_iter()
            .map(|p| (self.psnr(&frames, shown, background, p), p))
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .unwrap();
        ClipMeasurement {
            shown,
            purity,
            overlap: overlaps[shape],
            step,
            unsteady,
            background,
            position,
            psnr,
        }
    }

    /// Returns whether a pixel and its four neighbours are marked; a pixel on an outline is a blend
    /// and has no colour.
    fn is_interior(&self, marked: &[bool], i: usize) -> bool {
        let size = self.size;
        let (x, y) = (i % size, i / size);
        let around = [(1, 0), (size - 1, 0), (0, 1), (0, size - 1)];
        marked[i] && around.iter().all(|(dx, dy)| marked[(y + dy) % size * size + (x + dx) % size])
    }

    /// Returns the background that most pixels are nearest to; an object covers few pixels.
    fn nearest_background(&self, frames: &[&[Rgb]]) -> usize {
        argmin(self.backgrounds.iter().map(|ground| {
            let cost = |f: &[Rgb]| -> f64 {
                f.iter().zip(ground).step_by(3).map(|(p, g)| f64::from(distance(p, g).min(0.05))).sum()
            };
            SAMPLED_FRAMES.iter().map(|n| cost(frames[*n])).sum()
        }))
    }

    /// Returns the best overlap of a shape with a mask near the mask's centroid, and the centre of
    /// the shape there.
    fn best_overlap(&self, mask: &[bool], shape: usize, center: [f64; 2]) -> (f64, [i64; 2]) {
        let size = self.size as i64;
        let near = [0, 1].map(|i| (center[i] - self.offsets[shape][i]).round() as i64);
        let total = mask.iter().filter(|m| **m).count();
        let inside: Vec<[i64; 2]> = (0..size * size)
            .filter(|i| self.shapes[shape][*i as usize] >= 0.5)
            .map(|i| [i % size, i / size])
            .collect();
        let shifts = (-2..=2).flat_map(|y| (-2..=2).map(move |x| [x, y]));
        shifts
            .map(|shift| {
                let at = [0, 1].map(|i| (near[i] + shift[i]).rem_euclid(size));
                let shared = inside
                    .iter()
                    .filter(|[x, y]| mask[((y + at[1]) % size * size + (x + at[0]) % size) as usize])
                    .count();
                (shared as f64 / (total + inside.len() - shared) as f64, at)
            })
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .unwrap()
    }

    /// Returns the PSNR in decibels between frames and the valid clip that begins at `position`.
    fn psnr(&self, frames: &[&[Rgb]], shown: Prompt, background: usize, position: [i64; 2]) -> f64 {
        let size = self.size;
        let (ground, cover) = (&self.backgrounds[background], &self.shapes[shown.shape]);
        let paint = self.colors[shown.color];
        let mut sum = 0.0f64;
        for (n, frame) in frames.iter().enumerate() {
            let [cx, cy] = self.position_after(position, shown.direction, n as i64).map(|c| c as usize);
            for y in 0..size {
                let row = (y + size - cy) % size * size;
                let mut of_row = 0.0f32;
                for x in 0..size {
                    let share = cover[row + (x + size - cx) % size];
                    let (p, g) = (&frame[y * size + x], &ground[y * size + x]);
                    let valid = [0, 1, 2].map(|i| g[i] + share * (paint[i] - g[i]));
                    of_row += distance(p, &valid);
                }
                sum += f64::from(of_row);
            }
        }
        let mean = sum / (frames.len() * size * size * 3) as f64;
        10.0 * (4.0 / mean.max(1e-12)).log10()
    }
}

fn number(v: &Value) -> f32 {
    v.as_f64().unwrap() as f32
}

fn rgb(v: &Value) -> Rgb {
    [0, 1, 2].map(|i| number(&v[i]) / 127.5 - 1.0)
}

fn distance(a: &Rgb, b: &Rgb) -> f32 {
    (a[0] - b[0]).powi(2) + (a[1] - b[1]).powi(2) + (a[2] - b[2]).powi(2)
}

/// Returns the index of the smallest value, the first of equals.
fn argmin(values: impl Iterator<Item = f64>) -> usize {
    values.enumerate().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0
}

/// Wraps a difference on the torus to [−size/2, size/2).
fn wrap_torus(difference: f64, size: usize) -> f64 {
    let (d, size) = (difference, size as f64);
    (d + size / 2.0).rem_euclid(size) - size / 2.0
}

/// Returns the centroid (x, y) of the marked pixels on the torus, in [−size/2, size/2]: the angle
/// of their mean phase. The position of a pixel is its centre.
fn centroid(size: usize, marked: impl Fn(usize) -> bool) -> [f64; 2] {
    let (mut columns, mut rows) = (vec![0u32; size], vec![0u32; size]);
    for i in (0..size * size).filter(|i| marked(*i)) {
        columns[i % size] += 1;
        rows[i / size] += 1;
    }
    [columns, rows].map(|counts| {
        let (mut re, mut im) = (0.0, 0.0);
        for (i, n) in counts.into_iter().enumerate() {
            let angle = TAU * (i as f64 + 0.5) / size as f64;
            re += f64::from(n) * angle.cos();
            im += f64::from(n) * angle.sin();
        }
        im.atan2(re) * size as f64 / TAU
    })
}

/// Renders the coverage of a shape, with a ramp `edge` pixels wide along its outline.
fn shape_coverage(shape: &str, spec: &Value, edge: f32, size: usize) -> Vec<f32> {
    let side = size as f32;
    let from_center = |i: usize| (i as f32 + 0.5 + side / 2.0) % side - side / 2.0;
    let inside = |x: f32, y: f32| match shape {
        "circle" => number(&spec["radius"]) - x.hypot(y),
        "square" => number(&spec["half"]) - x.abs().max(y.abs()),
        "triangle" => {
            let [top, bottom, half] = ["top", "bottom", "half_base"].map(|k| number(&spec[k]));
            let height = bottom - top;
            let slant = (half * (y - top) / height - x.abs()) * height / height.hypot(half);
            slant.min(bottom - y)
        }
        other => panic!("no geometry for a {other}"),
    };
    (0..size * size)
        .map(|i| (inside(from_center(i % size), from_center(i / size)) / edge + 0.5).clamp(0.0, 1.0))
        .collect()
}

/// Renders a background from tiles of 16 × 16 pixels.
fn render_background(spec: &Value, size: usize) -> Vec<Rgb> {
    let (base, accent) = (rgb(&spec["base"]), rgb(&spec["accent"]));
    let pattern = spec["pattern"].as_str().unwrap();
    (0..size * size)
        .map(|i| {
            let (x, y) = (i % size % 16, i / size % 16);
            let share = match pattern {
                "dots" => (3.5 - (x as f32 - 7.5).hypot(y as f32 - 7.5)).clamp(0.0, 1.0),
                "diagonal" => f32::from((x + y) % 16 < 5),
                "checks" => f32::from((x < 8) == (y < 8)),
                "lines" => f32::from(y % 8 < 3),
                other => panic!("no pattern {other}"),
            };
            [0, 1, 2].map(|c| base[c] + share * (accent[c] - base[c]))
        })
        .collect()
}

/// Renders a valid clip of one chunk, to test the measurement itself.
pub fn render_clip(world: &World, prompt: Prompt, background: usize, position: [i64; 2]) -> Vec<f32> {
    let size = world.size as i64;
    let mut out = Vec::new();
    for n in 0..12 {
        let [cx, cy] = world.position_after(position, prompt.direction, n);
        for (y, x) in (0..size).flat_map(|y| (0..size).map(move |x| (y, x))) {
            let at = (y - cy).rem_euclid(size) * size + (x - cx).rem_euclid(size);
            let share = world.shapes[prompt.shape][at as usize];
            let ground = world.backgrounds[background][(y * size + x) as usize];
            let paint = world.colors[prompt.color];
            out.extend([0, 1, 2].map(|c| ground[c] + share * (paint[c] - ground[c])));
        }
    }
    out
}
