//! What Prometheus is told: counted as it happens, put into words when somebody asks.
//!
//! Counting is a few atomic additions and is never done while the guest stands still: a checkpoint
//! is counted when a spare has acknowledged it. Why there is no library for this is in
//! docs/decisions/2026-11-22-metrics.md.

mod page;
mod serve;
mod stored;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hotspare_cluster::DropCause;
use hotspare_image::NodeId;
use hotspare_replica::{HeartConfig, HeartEvent, HostRole};

pub use self::serve::serve;

use self::page::Page;
use self::stored::StoreMeter;
use crate::agent::Agent;
use crate::history::What;
use crate::rehearsal::Report;
use crate::report::EpochLine;
use crate::settings::Guarantee;

/// Something that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to it.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// Sets it to something.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Its value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How often something was at most each of `bounds`.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [u64],
    counts: Vec<Counter>,
    sum: Counter,
    /// What a bound of 1 is in the unit that is shown.
    unit: f64,
}

/// Times, ns: from what a pause of an idle guest takes to what a client gives up at.
const TIMES: &[u64] = &[
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    1_000_000_000,
    10_000_000_000,
];
/// Pages of a checkpoint.
const PAGES: &[u64] = &[16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576];

impl Histogram {
    fn new(bounds: &'static [u64], unit: f64) -> Self {
        let counts = (0..=bounds.len()).map(|_| Counter::default()).collect();
        Self { bounds, counts, sum: Counter::default(), unit }
    }

    fn of_times() -> Self {
        Self::new(TIMES, 1e-9)
    }

    /// Notes `times` values, each about `value`.
    fn add(&self, value: u64, times: u64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].add(times);
        self.sum.add(value.saturating_mul(times));
    }

    /// Notes a time.
    pub fn time(&self, time: Duration) {
        self.add(time.as_nanos() as u64, 1);
    }
}

/// Names of the parts of a pause, in order.
const PAUSE_PARTS: [&str; 7] = ["stop", "scan", "copy", "registers", "objects", "files", "resume"];
/// Reasons for which something is refused, as labels.
const REFUSALS: [&str; 5] = ["guest", "late", "switchover", "takeover", "ghost"];
/// What becomes of rehearsals, as labels.
const REHEARSALS: [&str; 3] = ["passed", "failed", "given-up"];
/// Causes for which a spare is dropped, as labels.
const DROPS: [&str; 3] = ["silent", "never-heard", "new-term"];

/// What is counted.
#[derive(Debug)]
pub struct Meters {
    epochs: Counter,
    pages: Counter,
    sent_bytes: Counter,
    /// Of replicated directories: sent by a primary, received by a spare.
    pub file_bytes: Counter,
    pause: Histogram,
    pause_parts: [Histogram; 7],
    dirty: Histogram,
    output_packets: Counter,
    output_wait: Histogram,
    applied: Counter,
    apply: Histogram,
    full_copies: Counter,
    heartbeats: Counter,
    missed: Counter,
    silences: Counter,
    failovers: Counter,
    switchovers: Counter,
    refusals: [Counter; 5],
    drops: [Counter; 3],
    /// Steps of something long on the thread that owns the guest: it does not hang.
    pub progress: Counter,
    /// Records that wait for a disk.
    pub unwritten: Counter,
    /// `CLOCK_MONOTONIC` of the newest checkpoint that a spare has, ns; 0 if there is none.
    newest_ns: Counter,
    rehearsals: [Counter; 3],
    /// Time of day of the last rehearsal, and of the last that passed; 0: none.
    rehearsed_ms: Counter,
    rehearsal_passed_ms: Counter,
    rehearsal_failed: Counter,
    rehearsal_finalise_us: Counter,
    /// How often there is to be one, ms; 0: only when asked for.
    pub rehearsal_interval: Counter,
    /// Of the store.
    pub store: StoreMeter,
}

impl Default for Meters {
    fn default() -> Self {
        let counter = Counter::default;
        Self {
            epochs: counter(),
            pages: counter(),
            sent_bytes: counter(),
            file_bytes: counter(),
            pause: Histogram::of_times(),
            pause_parts: std::array::from_fn(|_| Histogram::of_times()),
            dirty: Histogram::new(PAGES, 1.0),
            output_packets: counter(),
            output_wait: Histogram::of_times(),
            applied: counter(),
            apply: Histogram::of_times(),
            full_copies: counter(),
            heartbeats: counter(),
            missed: counter(),
            silences: counter(),
            failovers: counter(),
            switchovers: counter(),
            refusals: Default::default(),
            drops: Default::default(),
            progress: counter(),
            unwritten: counter(),
            newest_ns: counter(),
            rehearsals: Default::default(),
            rehearsed_ms: counter(),
            rehearsal_passed_ms: counter(),
            rehearsal_failed: counter(),
            rehearsal_finalise_us: counter(),
            rehearsal_interval: counter(),
            store: StoreMeter::default(),
        }
    }
}

impl Meters {
    /// A checkpoint is committed.
    pub fn epoch(&self, line: &EpochLine) {
        self.epochs.add(1);
        self.pages.add(line.pages);
        self.sent_bytes.add(line.bytes);
        self.dirty.add(line.pages, 1);
        let parts = &line.parts;
        self.pause.time(parts.total);
        let each = [
            parts.stop,
            parts.scan,
            parts.copy,
            parts.registers,
            parts.objects,
            parts.files,
            parts.resume,
        ];
        for (histogram, part) in self.pause_parts.iter().zip(each) {
            histogram.time(part);
        }
        self.output_packets.add(line.output.released);
        self.output_wait.add(line.output.mean().as_nanos() as u64, line.output.released);
        self.newest_ns.set(line.stop_ns);
    }

    /// The guest was stopped for a checkpoint that only the store gets.
    pub fn stopped(&self, line: &EpochLine) {
        self.pause.time(line.parts.total);
    }

    /// A spare has taken a checkpoint into its ghost.
    pub fn applied(&self, took: Duration, full: bool, file_bytes: u64) {
        self.file_bytes.add(file_bytes);
        self.newest_ns.set(monotonic_ns());
        if full {
            self.full_copies.add(1);
        } else {
            self.applied.add(1);
            self.apply.time(took);
        }
    }

    /// Something that the history keeps.
    pub fn note(&self, what: &What) {
        let refusal = match what {
            What::Failover { .. } => return self.failovers.add(1),
            What::SwitchedHere { .. } => return self.switchovers.add(1),
            What::Refused { .. } => 0,
            What::Late { .. } => 1,
            What::NotSwitched { .. } => 2,
            What::TakeoverFailed { .. } => 3,
            What::Abandoned { .. } => 4,
            What::Rehearsed(report) => return self.rehearsed(report),
            What::NotRehearsed { .. } => return self.rehearsals[2].add(1),
            What::Started
            | What::Protected
            | What::Unprotected { .. }
            | What::Accepted
            | What::Paused { .. }
            | What::Resumed
            | What::SwitchedAway { .. }
            | What::Fenced { .. }
            | What::Stored { .. }
            | What::NotStored { .. }
            | What::Restored { .. }
            | What::Ended { .. } => return,
        };
        self.refusals[refusal].add(1);
    }

    fn rehearsed(&self, report: &Report) {
        self.rehearsals[usize::from(!report.passed)].add(1);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.rehearsed_ms.set(now.as_millis() as u64);
        if report.passed {
            self.rehearsal_passed_ms.set(now.as_millis() as u64);
        }
        self.rehearsal_failed.set(u64::from(!report.passed));
        self.rehearsal_finalise_us.set((report.finalise_ms * 1000.0) as u64);
    }

    /// A spare is dropped.
    pub fn dropped(&self, cause: DropCause) {
        let which = match cause {
            DropCause::Silent => 0,
            DropCause::NeverHeard => 1,
            DropCause::NewTerm => 2,
        };
        self.drops[which].add(1);
    }
}

/// Counts what the heart hears.
#[derive(Default)]
pub struct HeartMeter(HashMap<NodeId, Instant>);

impl HeartMeter {
    /// Notes an event of the heart; on its thread.
    pub fn note(&mut self, event: &HeartEvent, meters: &Meters) {
        match event {
            HeartEvent::Beat { beat, at } => {
                meters.heartbeats.add(1);
                if let Some(before) = self.0.insert(beat.from, *at) {
                    meters.missed.add(missed(at.saturating_duration_since(before)));
                }
            }
            HeartEvent::Silence { .. } => meters.silences.add(1),
            HeartEvent::CannotSend { .. } | HeartEvent::NotRealtime(_) | HeartEvent::Leashed => {}
        }
    }
}

/// Heartbeats that should have come between two that came `gap` apart. Half an interval late is
/// only late.
fn missed(gap: Duration) -> u64 {
    let interval = HeartConfig::default().interval.as_nanos() as u64;
    ((gap.as_nanos() as u64 + interval / 2) / interval).saturating_sub(1)
}

fn monotonic_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    now.map_or(0, |now| Duration::from(now).as_nanos() as u64)
}

impl Agent {
    /// All of it, in Prometheus' text format 0.0.4.
    pub fn metrics(&self) -> String {
        let mut page = Page::default();
        self.standing(&mut page);
        self.meters.checkpoints(&mut page);
        self.meters.takeovers(&mut page);
        self.meters.rehearsed_so_far(&mut page);
        self.meters.store.show(&mut page);
        page.0
    }

    /// How things stand at this instant.
    fn standing(&self, page: &mut Page) {
        let face = self.face();
        let settings = face.settings.as_ref();
        let guest = settings.map_or("", |settings| &settings.guest).to_owned();
        let guarantee = settings.map_or(Guarantee::default(), |settings| settings.guarantee);
        let is_primary = face.role == HostRole::Primary;
        let (term, epoch, spares, ready) = (face.term.0, face.epoch, face.spares, face.ready);
        let paused = face.paused;
        let lags: Vec<(NodeId, u64)> = face
            .committed
            .iter()
            .map(|(node, at)| (*node, epoch.saturating_sub(at.position().epoch.0)))
            .collect();
        let gate = face.gate.clone();
        drop(face);
        let version = env!("CARGO_PKG_VERSION");
        page.head("hotspare_build_info", "gauge", "The program; always 1.");
        page.value("hotspare_build_info", &[("version", version)], 1.0);
        page.head("hotspare_guest_info", "gauge", "The guest; always 1. None on an idle spare.");
        if !guest.is_empty() {
            let labels = [("guest", &*guest), ("guarantee", &guarantee.to_string())];
            page.value("hotspare_guest_info", &labels, 1.0);
        }
        let gauges = [
            ("hotspare_primary", "1 if this host runs the guest.", f64::from(is_primary)),
            (
                "hotspare_protected",
                "Of a primary: 1 if a spare could take over.",
                f64::from(is_primary && ready > 0),
            ),
            (
                "hotspare_protection_paused",
                "Of a primary: 1 if protection is paused on purpose.",
                f64::from(paused),
            ),
            ("hotspare_spares", "Of a primary: spares that are connected.", spares as f64),
            ("hotspare_spares_ready", "Of a primary: spares that could take over.", ready as f64),
            ("hotspare_term", "Number of the reign; grows with every takeover.", term as f64),
            ("hotspare_epoch", "Last checkpoint taken, or applied on a spare.", epoch as f64),
            (
                "hotspare_ghost_ready",
                "Of a spare: 1 if it has a complete ghost.",
                f64::from(!is_primary && epoch > 0),
            ),
            (
                "hotspare_output_gate_closed",
                "1 if output waits for checkpoints (output-commit).",
                f64::from(gate.as_ref().is_some_and(|gate| gate.is_closed())),
            ),
            (
                "hotspare_output_held_bytes",
                "Output that waits for a checkpoint, in bytes.",
                gate.as_ref().map_or(0.0, |gate| gate.waiting_bytes() as f64),
            ),
            (
                "hotspare_history_unwritten",
                "Records of the history that the disk does not take.",
                self.meters.unwritten.get() as f64,
            ),
        ];
        for (name, help, value) in gauges {
            page.head(name, "gauge", help);
            page.value(name, &[], value);
        }
        self.lasting(page, is_primary, &lags);
    }

    /// How long the primary may go on, and how far its spares are behind.
    fn lasting(&self, page: &mut Page, is_primary: bool, lags: &[(NodeId, u64)]) {
        let name = "hotspare_lease_seconds";
        page.head(name, "gauge", "With an arbiter: how long a primary may go on without its word.");
        if let Some(arbiter) = self.arbiter.as_ref().filter(|_| is_primary) {
            page.value(name, &[], arbiter.lease.rest().as_secs_f64());
        }
        let name = "hotspare_spare_lag_epochs";
        page.head(name, "gauge", "Of a primary: checkpoints that a spare has not acknowledged.");
        for (node, lag) in lags {
            page.value(name, &[("spare", &format!("{:016x}", node.0))], *lag as f64);
        }
    }
}

impl Meters {
    fn checkpoints(&self, page: &mut Page) {
        page.head(
            "hotspare_checkpoint_age_seconds",
            "gauge",
            "Age of the newest checkpoint that a spare has; on a spare, since it was applied.",
        );
        if let newest @ 1.. = self.newest_ns.get() {
            let age = monotonic_ns().saturating_sub(newest);
            page.value("hotspare_checkpoint_age_seconds", &[], age as f64 / 1e9);
        }
        for (name, help, counter) in [
            ("hotspare_epochs_total", "Checkpoints that spares have.", &self.epochs),
            ("hotspare_pages_total", "Pages sent, 4 KiB each.", &self.pages),
            ("hotspare_sent_bytes_total", "Bytes sent to spares.", &self.sent_bytes),
            (
                "hotspare_file_bytes_total",
                "Changes of replicated directories, sent or received, in bytes.",
                &self.file_bytes,
            ),
            ("hotspare_output_packets_total", "Packets that waited.", &self.output_packets),
            ("hotspare_applied_epochs_total", "Of a spare: checkpoints applied.", &self.applied),
            ("hotspare_full_copies_total", "Of a spare: full copies applied.", &self.full_copies),
        ] {
            page.head(name, "counter", help);
            page.value(name, &[], counter.get() as f64);
        }
        page.head("hotspare_pause_seconds", "histogram", "How long the guest stood still.");
        page.histogram("hotspare_pause_seconds", None, &self.pause);
        page.head("hotspare_pause_part_seconds", "histogram", "Parts of the pauses.");
        for (part, histogram) in PAUSE_PARTS.iter().zip(&self.pause_parts) {
            page.histogram("hotspare_pause_part_seconds", Some(("part", part)), histogram);
        }
        for (name, help, histogram) in [
            ("hotspare_dirty_pages", "Pages of a checkpoint.", &self.dirty),
            (
                "hotspare_output_wait_seconds",
                "How long packets waited; of each checkpoint, their mean.",
                &self.output_wait,
            ),
            (
                "hotspare_apply_seconds",
                "Of a spare: taking a checkpoint into the ghost; no full copies.",
                &self.apply,
            ),
        ] {
            page.head(name, "histogram", help);
            page.histogram(name, None, histogram);
        }
    }

    fn takeovers(&self, page: &mut Page) {
        for (name, help, counter) in [
            ("hotspare_heartbeats_total", "Heartbeats heard.", &self.heartbeats),
            ("hotspare_heartbeats_missed_total", "Heartbeats that did not come.", &self.missed),
            ("hotspare_silences_total", "Times that a host was silent too long.", &self.silences),
            ("hotspare_failovers_total", "Takeovers by this host, unplanned.", &self.failovers),
            ("hotspare_switchovers_total", "Planned moves to this host.", &self.switchovers),
        ] {
            page.head(name, "counter", help);
            page.value(name, &[], counter.get() as f64);
        }
        let name = "hotspare_refusals_total";
        page.head(
            name,
            "counter",
            "What could not be: a checkpoint of this guest, one in time, a switchover, a \
             takeover that failed, one for which the ghost was not fit.",
        );
        for (reason, counter) in REFUSALS.iter().zip(&self.refusals) {
            page.value(name, &[("reason", reason)], counter.get() as f64);
        }
        let name = "hotspare_spares_dropped_total";
        page.head(name, "counter", "Spares that the primary has dropped.");
        for (cause, counter) in DROPS.iter().zip(&self.drops) {
            page.value(name, &[("cause", cause)], counter.get() as f64);
        }
    }
}

impl Meters {
    fn rehearsed_so_far(&self, page: &mut Page) {
        let name = "hotspare_rehearsals_total";
        page.head(name, "counter", "Of a spare: rehearsals, by what became of them.");
        for (result, counter) in REHEARSALS.iter().zip(&self.rehearsals) {
            page.value(name, &[("result", result)], counter.get() as f64);
        }
        let passed = 1.0 - self.rehearsal_failed.get() as f64;
        let seconds = |counter: &Counter| counter.get() as f64 / 1e3;
        let took = self.rehearsal_finalise_us.get() as f64 / 1e6;
        let any = self.rehearsed_ms.get() > 0;
        for (name, help, value, there) in [
            ("hotspare_rehearsal_passed", "1 if the last rehearsal passed.", passed, any),
            (
                "hotspare_rehearsal_finalise_seconds",
                "What the last rehearsal took from the last checkpoint until its copy could run.",
                took,
                any,
            ),
            (
                "hotspare_rehearsal_last_timestamp_seconds",
                "When the last rehearsal was.",
                seconds(&self.rehearsed_ms),
                any,
            ),
            (
                "hotspare_rehearsal_last_success_timestamp_seconds",
                "When the last rehearsal was that passed.",
                seconds(&self.rehearsal_passed_ms),
                self.rehearsal_passed_ms.get() > 0,
            ),
            (
                "hotspare_rehearsal_interval_seconds",
                "How often there is to be a rehearsal; 0: only when asked for.",
                seconds(&self.rehearsal_interval),
                true,
            ),
        ] {
            page.head(name, "gauge", help);
            if there {
                page.value(name, &[], value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_heartbeat_is_not_a_missed_one() {
        let ms = Duration::from_millis;
        for (gap, expected) in [(0, 0), (30, 0), (44, 0), (46, 1), (60, 1), (3000, 99)] {
            assert_eq!(missed(ms(gap)), expected, "{gap} ms");
        }
    }

    #[test]
    fn values_fall_into_the_bucket_that_bounds_them() {
        let histogram = Histogram::of_times();
        histogram.time(Duration::from_micros(100));
        histogram.time(Duration::from_micros(101));
        histogram.time(Duration::from_secs(60));
        histogram.add(2_000_000, 5);
        let mut page = Page::default();
        page.histogram("x", Some(("part", "scan")), &histogram);
        for line in [
            "x_bucket{part=\"scan\",le=\"0.0001\"} 1\n",
            "x_bucket{part=\"scan\",le=\"0.00025\"} 2\n",
            "x_bucket{part=\"scan\",le=\"0.001\"} 2\n",
            "x_bucket{part=\"scan\",le=\"0.0025\"} 7\n",
            "x_bucket{part=\"scan\",le=\"10\"} 7\n",
            "x_bucket{part=\"scan\",le=\"+Inf\"} 8\n",
            "x_count{part=\"scan\"} 8\n",
        ] {
            assert!(page.0.contains(line), "{line}{}", page.0);
        }
        let sum = page.0.lines().find_map(|line| line.strip_prefix("x_sum{part=\"scan\"} "));
        let sum: f64 = sum.expect("a sum").parse().expect("a number");
        assert!((sum - 60.010201).abs() < 1e-9, "{sum}");
    }
}
