//! Distributes a layout's layers over stages and times the stages.

use std::ops::Range;

use tessera_cost::op_cost::CostParts;
use tessera_cost::params::PipelineSchedule;
use tessera_cost::schedule::{MicroBatchTimes, bubble_ns, find_micro_batches};

use super::super::{Candidate, Job, StepTimes};
use super::{CostSummary, Estimator, LayoutCost, PipelineCost};

impl Estimator<'_> {
    /// Distributes a layout's layers over stages under the candidate's schedule, and computes the
    /// memory footprints.
    pub fn compute_pipeline(&mut self, c: &Candidate, node: &mut LayoutCost, out: &mut PipelineCost) {
        let (pp, v) = (c.pp, c.interleave.max(1));
        out.split = match node.chosen_splits.iter().find(|(key, _)| *key == (pp, v)) {
            Some((_, cut)) => *cut,
            None => {
                let cut = self.choose_split(node, pp, v);
                node.chosen_splits.push(((pp, v), cut));
                cut
            }
        };
        self.update_footprints(c, node, out);
        out.is_timed = false;
    }

    /// Returns the split over `stages` stages of `chunks` chunks each whose slowest stage is
    /// fastest.
    fn choose_split(&mut self, node: &LayoutCost, stages: u32, chunks: u32) -> usize {
        let options = self.split_ranges.get_or_insert((stages, chunks), || {
            let begin = self.splits.len();
            self.splits.extend(self.balancer.candidate_splits(&self.kinds, stages, chunks));
            begin..self.splits.len()
        });
        let ends = (node.first_cost.total.total_ns(), node.last_cost.total.total_ns());
        let (mut least, mut best) = (f64::INFINITY, options.start);
        if options.len() > 1 {
            for option in options.clone() {
                let dearest = self.splits[option].slowest_stage_ns(&node.layer_ns, ends);
                if dearest < least {
                    (least, best) = (dearest, option);
                }
            }
        }
        best
    }

    /// Computes stage times, bubble and sends for the split that `compute_pipeline` chose.
    pub fn time_stages(&self, c: &Candidate, node: &LayoutCost, out: &mut PipelineCost) {
        let m = &self.q.machine;
        let pp = c.pp;
        out.is_timed = true;
        out.stage_ns.clear();
        let launch = m.launch_ns();
        let (mut slowest, mut at, mut mean) = ((-1.0, [0.0; 3], 0.0), 0, [0.0; 3]);
        for stage in 0..pp {
            let (mut device, mut host) = ([0.0; 3], [0.0; 3]);
            self.for_each_layer(c, node, out.split, stage, |n, cost| {
                for i in 0..3 {
                    device[i] += n * cost.pass_ns[i];
                    host[i] += n * cost.launches[i] * launch;
                }
            });
            let pass_ns = [0, 1, 2].map(|i| f64::max(device[i], host[i]));
            let sum: f64 = pass_ns.iter().sum();
            (0..3).for_each(|i| mean[i] += pass_ns[i] / f64::from(pp));
            out.stage_ns.push(sum);
            if sum > slowest.0 {
                slowest = (sum, pass_ns, sum - device.iter().sum::<f64>());
                at = stage;
            }
        }
        let (work_ns, pass_ns, launch_ns) = slowest;
        let mut part = CostParts::default();
        self.for_each_layer(c, node, out.split, at, |n, cost| part += cost.total * n);
        out.slowest_part = part;

        let hidden = if self.overlaps_exchange(c, node) {
            part.ep_exposed_ns.min(part.compute_ns + part.memory_ns)
        } else {
            0.0
        };
        out.overlapped_ns = (hidden * (2.0 - m.contention_factor())).max(0.0);
        let keep = if work_ns > 0.0 { 1.0 - out.overlapped_ns / work_ns } else { 1.0 };
        out.stage_ns.iter_mut().for_each(|s| *s *= keep);
        out.slowest_ns = work_ns * keep;
        out.slowest_forward_ns = pass_ns[0] * keep;
        out.exposed_launch_ns = launch_ns;
        self.time_bubble(c, node, mean.map(|ns| ns * keep), out);
    }

    /// Computes bubble and sends. `mean_ns` are the mean times of a stage for each pass of one
    /// micro-batch.
    fn time_bubble(&self, c: &Candidate, node: &LayoutCost, mean_ns: [f64; 3], out: &mut PipelineCost) {
        let (pp, v) = (c.pp, c.interleave.max(1));
        let n = f64::from(node.micro_batches);
        let send = node.send_ns;
        if pp == 1 {
            (out.bubble_ns, out.sends_ns) = (0.0, 0.0);
        } else if self.is_training() {
            let pace = MicroBatchTimes {
                forward_ns: mean_ns[0],
                backward_input_ns: mean_ns[1],
                backward_weight_ns: mean_ns[2],
                send_ns: 0.0,
            };
            let passes = 2.0 * f64::from(v);
            let fill = passes * f64::from(pp - 1) * send;
            out.bubble_ns = bubble_ns(c.schedule, pp, v, node.micro_batches, &pace).max(0.0);
            out.sends_ns = n * passes * send + fill;
        } else {
            // Inference runs in waves: all stages once, and the slowest stage for each further
            // micro-batch. A decoded token must leave the last stage before its sequence can enter
            // the first again.
            let fill_ns: f64 = out.stage_ns.iter().sum::<f64>();
            let step = match self.q.job {
                Job::Decode { .. } => f64::max(n * (out.slowest_ns + send), fill_ns + f64::from(pp) * send),
                _ => (n - 1.0) * (out.slowest_ns + send) + fill_ns + f64::from(pp - 1) * send,
            };
            out.sends_ns = n * send;
            out.bubble_ns = (step - n * out.slowest_ns - out.sends_ns).max(0.0);
        }
    }

    /// Returns the share of a step of `count` micro-batches that each stage waits for others. The
    /// micro-batches have the size of those that `times` describes; `pipe` is timed.
    pub fn idle_shares(
        &self,
        c: &Candidate,
        node: &LayoutCost,
        pipe: &PipelineCost,
        times: &StepTimes,
        count: u32,
    ) -> Vec<f64> {
        // The ends of a step do not depend on its micro-batches, and its sends do.
        let ends_ns = times.optimizer_ns + times.fetch_ns + times.pp_dp_ns - pipe.sends_ns;
        let node = LayoutCost { micro_batches: count, ..node.clone() };
        let mut pipe = pipe.clone();
        self.time_stages(c, &node, &mut pipe);
        let n = f64::from(count);
        let others_ns = ends_ns + pipe.sends_ns;
        let step_ns = n * pipe.slowest_ns + pipe.bubble_ns + others_ns;
        pipe.stage_ns.iter().map(|ns| (1.0 - (n * ns + others_ns) / step_ns).max(0.0)).collect()
    }

    /// Returns the fewest micro-batches of this size for which every stage waits for less than
    /// `share` of the step, or `None` if no number is enough.
    pub fn find_micro_batches(
        &self,
        c: &Candidate,
        node: &LayoutCost,
        pipe: &PipelineCost,
        times: &StepTimes,
        share: f64,
    ) -> Option<u32> {
        find_micro_batches(c.schedule, c.pp, |count| {
            self.idle_shares(c, node, pipe, times, count).iter().all(|idle| *idle < share)
        })
    }

    /// Returns whether dispatch and combine of one micro-batch overlap the compute of another: two
    /// are in flight, and the executor supports it.
    pub(super) fn overlaps_exchange(&self, c: &Candidate, node: &LayoutCost) -> bool {
        if !self.q.machine.device_curves().overlap.overlaps_dispatch {
            return false;
        }
        match self.is_training() {
            true => c.schedule == PipelineSchedule::DualPipe,
            false => node.micro_batches >= 2 * c.pp,
        }
    }

    /// Returns the layers of one stage, one range per model chunk.
    pub fn stage_chunks(&self, c: &Candidate, pipe: &PipelineCost, stage: u32) -> Vec<Range<u64>> {
        let at = |i: u32| u64::from(self.splits[pipe.split].boundaries[i as usize]);
        (0..c.interleave.max(1)).map(|v| v * c.pp + stage).map(|i| at(i)..at(i + 1)).collect()
    }

    /// Calls `visit` for everything that a stage runs: each kind's layer count and cost, embedding
    /// and head included.
    pub(super) fn for_each_layer(
        &self,
        c: &Candidate,
        node: &LayoutCost,
        cut: usize,
        stage: u32,
        mut visit: impl FnMut(f64, &CostSummary),
    ) {
        for (n, cost) in self.splits[cut].stage_layers(stage).iter().zip(&node.layer_costs) {
            if *n > 0.0 {
                visit(*n, cost);
            }
        }
        if stage == 0 {
            visit(1.0, &node.first_cost);
        }
        if stage + 1 == c.pp {
            visit(1.0, &node.last_cost);
        }
    }
}
