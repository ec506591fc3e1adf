//! Names and shapes of a VAE's tensors. In a program they have the original names after `vae.`; the
//! names of original files and of diffusers files are aliases.

use super::VaeConfig;
use crate::ExpectedWeight;

/// Lists every tensor of the VAE in a fixed order. The mean and the standard deviation of the latents are
/// settings and not among them.
#[must_use]
pub fn expected_vae_weights(c: &VaeConfig) -> Vec<ExpectedWeight> {
    let mut list = VaeWeightList(Vec::new());
    let (z, base, widths) = (c.z_dim, c.base_dim, c.widths());
    let top = widths.last().copied().unwrap_or(base);
    list.push_conv("encoder.conv1", "encoder.conv_in", base, 3, &[3, 3, 3]);
    let (mut block, mut from) = (0, base);
    for (level, to) in widths.iter().copied().enumerate() {
        for _ in 0..c.res_blocks {
            let (ours, theirs) =
                (format!("encoder.downsamples.{block}"), format!("encoder.down_blocks.{block}"));
            list.push_residual(&ours, &theirs, from, to);
            (from, block) = (to, block + 1);
        }
        if let Some(halves_frames) = c.temporal_downsample.get(level) {
            let (ours, theirs) =
                (format!("encoder.downsamples.{block}"), format!("encoder.down_blocks.{block}"));
            list.push_conv(&format!("{ours}.resample.1"), &format!("{theirs}.resample.1"), to, to, &[3, 3]);
            if *halves_frames {
                list.push_conv(
                    &format!("{ours}.time_conv"),
                    &format!("{theirs}.time_conv"),
                    to,
                    to,
                    &[3, 1, 1],
                );
            }
            block += 1;
        }
    }
    list.push_middle("encoder", top);
    list.push_head("encoder", top, 2 * z);
    list.push_conv("conv1", "quant_conv", 2 * z, 2 * z, &[1, 1, 1]);
    list.push_conv("conv2", "post_quant_conv", z, z, &[1, 1, 1]);
    list.push_conv("decoder.conv1", "decoder.conv_in", top, z, &[3, 3, 3]);
    list.push_middle("decoder", top);
    let (mut block, mut from) = (0, top);
    for (i, to) in widths.iter().rev().copied().enumerate() {
        for j in 0..=c.res_blocks {
            let theirs = format!("decoder.up_blocks.{i}.resnets.{j}");
            list.push_residual(&format!("decoder.upsamples.{block}"), &theirs, from, to);
            (from, block) = (to, block + 1);
        }
        if let Some(doubles_frames) = c.temporal_downsample.iter().rev().nth(i) {
            let (ours, theirs) =
                (format!("decoder.upsamples.{block}"), format!("decoder.up_blocks.{i}.upsamplers.0"));
            if *doubles_frames {
                list.push_conv(
                    &format!("{ours}.time_conv"),
                    &format!("{theirs}.time_conv"),
                    2 * to,
                    to,
                    &[3, 1, 1],
                );
            }
            list.push_conv(
                &format!("{ours}.resample.1"),
                &format!("{theirs}.resample.1"),
                to / 2,
                to,
                &[3, 3],
            );
            (from, block) = (to / 2, block + 1);
        }
    }
    list.push_head("decoder", from, 3);
    list.0
}

struct VaeWeightList(Vec<ExpectedWeight>);

impl VaeWeightList {
    fn push_weight(&mut self, ours: &str, theirs: &str, shape: &[u64]) {
        self.0.push(ExpectedWeight {
            name: format!("vae.{ours}"),
            diffusers_name: theirs.into(),
            shape: shape.to_vec(),
        });
    }

    fn push_conv(&mut self, ours: &str, theirs: &str, out: u64, from: u64, taps: &[u64]) {
        let shape = [&[out, from], taps].concat();
        self.push_weight(&format!("{ours}.weight"), &format!("{theirs}.weight"), &shape);
        self.push_weight(&format!("{ours}.bias"), &format!("{theirs}.bias"), &[out]);
    }

    fn push_gamma(&mut self, ours: &str, theirs: &str, c: u64, other_dims: usize) {
        let shape = [vec![c], vec![1; other_dims]].concat();
        self.push_weight(&format!("{ours}.gamma"), &format!("{theirs}.gamma"), &shape);
    }

    fn push_residual(&mut self, ours: &str, theirs: &str, from: u64, to: u64) {
        self.push_gamma(&format!("{ours}.residual.0"), &format!("{theirs}.norm1"), from, 3);
        self.push_conv(&format!("{ours}.residual.2"), &format!("{theirs}.conv1"), to, from, &[3, 3, 3]);
        self.push_gamma(&format!("{ours}.residual.3"), &format!("{theirs}.norm2"), to, 3);
        self.push_conv(&format!("{ours}.residual.6"), &format!("{theirs}.conv2"), to, to, &[3, 3, 3]);
        if from != to {
            self.push_conv(
                &format!("{ours}.shortcut"),
                &format!("{theirs}.conv_shortcut"),
                to,
                from,
                &[1, 1, 1],
            );
        }
    }

    fn push_middle(&mut self, side: &str, c: u64) {
        let (ours, theirs) = (format!("{side}.middle"), format!("{side}.mid_block"));
        self.push_residual(&format!("{ours}.0"), &format!("{theirs}.resnets.0"), c, c);
        let (a, b) = (format!("{ours}.1"), format!("{theirs}.attentions.0"));
        self.push_gamma(&format!("{a}.norm"), &format!("{b}.norm"), c, 2);
        self.push_conv(&format!("{a}.to_qkv"), &format!("{b}.to_qkv"), 3 * c, c, &[1, 1]);
        self.push_conv(&format!("{a}.proj"), &format!("{b}.proj"), c, c, &[1, 1]);
        self.push_residual(&format!("{ours}.2"), &format!("{theirs}.resnets.1"), c, c);
    }

    fn push_head(&mut self, side: &str, from: u64, out: u64) {
        self.push_gamma(&format!("{side}.head.0"), &format!("{side}.norm_out"), from, 3);
        self.push_conv(&format!("{side}.head.2"), &format!("{side}.conv_out"), out, from, &[3, 3, 3]);
    }
}
