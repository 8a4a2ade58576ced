//! What the program says while it works: lines for people, or JSON for machines.

use std::collections::VecDeque;
use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hotspare_net::gate::GateStats;
use hotspare_process::capture::PauseParts;
use hotspare_process::lazy::Loaded;
use serde_json::json;
use tokio::sync::broadcast;

use crate::history::Record;
use crate::spare::Stale;

/// Tells what happens. Cheap to clone.
#[derive(Clone)]
pub struct Reporter {
    json: bool,
    /// Standard error is the journal's: lines begin with their priority, see sd-daemon(3).
    journal: bool,
    status: Arc<Mutex<StatusLine>>,
    listeners: broadcast::Sender<Happening>,
}

/// What those who listen are told.
#[derive(Clone, Debug)]
pub struct Happening {
    /// When, in milliseconds since 1970.
    pub wall_ms: u64,
    /// What.
    pub news: News,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum News {
    /// Something was said.
    Note(Weight, String),
    /// Something that the history keeps.
    Record(Box<Record>),
    /// A checkpoint is committed.
    Epoch(EpochLine),
}

/// Happenings that wait for the slowest listener; more are lost to it.
const HAPPENINGS_MAX: usize = 1024;

/// How much something matters, as the journal counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// Somebody must look.
    Error = 3,
    /// Surprising, and it goes on.
    Warning = 4,
    /// Worth knowing.
    Notice = 5,
}

/// Whether standard error leads to the journal: systemd names its device and inode.
fn writes_to_journal() -> bool {
    let Ok(named) = std::env::var("JOURNAL_STREAM") else { return false };
    let own = nix::sys::stat::fstat(std::io::stderr());
    own.is_ok_and(|own| named == format!("{}:{}", own.st_dev, own.st_ino))
}

/// Writes to stderr. What that does not take (a full disk, a reader that is gone, no memory for a
/// pipe) is lost: nobody's guest ends for it, as `eprintln!` would have it.
fn write_or_lose(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// The lines of a text for the journal, each with its priority.
fn for_journal(weight: Weight, text: &str) -> String {
    text.lines().map(|line| format!("<{}>{line}\n", weight as u8)).collect()
}

#[derive(Default)]
struct StatusLine {
    shown: bool,
    changed: Option<Instant>,
    told_copy: Option<Instant>,
    pauses_us: VecDeque<f64>,
}

/// Pauses that the percentiles are made of: a minute at ten epochs a second.
const PAUSES_KEPT: usize = 600;
/// The line at the bottom changes this often at most.
const REFRESH: Duration = Duration::from_millis(100);

/// Where there is no terminal, a long copy is told this often.
const LONG: Duration = Duration::from_secs(10);

/// Width of the terminal, as the kernel keeps it; 80 where it does not.
fn columns() -> usize {
    let size = terminal_size::terminal_size_of(std::io::stderr());
    size.map_or(80, |(width, _)| usize::from(width.0)).max(20)
}

fn time(us: f64) -> String {
    if us < 10_000.0 { format!("{us:.0} µs") } else { format!("{:.1} ms", us / 1000.0) }
}

/// Bytes in three digits or four.
pub fn size(bytes: u64) -> String {
    match bytes {
        0..10_000 => format!("{bytes} B"),
        10_000..10_240_000 => format!("{} KiB", bytes >> 10),
        10_240_000..10_485_760_000 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}

/// A takeover in its parts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Failover {
    /// From the last sign of life of the primary to the decision.
    pub detect: Duration,
    /// Applying the checkpoints that had arrived by then.
    pub apply: Duration,
    /// From the decision to a ghost that is ready to run.
    pub finalise: Duration,
    /// Taking the address and letting go.
    pub address: Duration,
    /// The checkpoint it runs from.
    pub epoch: u64,
    /// The new term.
    pub term: u64,
}

/// The end of a guest.
#[derive(Clone, Copy, Debug)]
pub struct End {
    /// wait(2) status of the program.
    pub status: i32,
    /// As a shell gives it.
    pub code: u8,
    /// A spare goes on with it.
    pub goes_on: bool,
    /// How long ago this host took over, if it did.
    pub since_takeover: Option<Duration>,
}

/// An end so soon after a takeover may have to do with it.
const SOON: Duration = Duration::from_secs(10);

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !libc::WIFSIGNALED(self.status) {
            return write!(f, "the guest ended with status {}", self.code);
        }
        let number = libc::WTERMSIG(self.status);
        let signal = nix::sys::signal::Signal::try_from(number);
        let signal = signal.map_or(format!("signal {number}"), |signal| signal.to_string());
        if number == libc::SIGKILL && self.goes_on {
            return write!(f, "the guest was killed (SIGKILL); a spare goes on with it");
        }
        if number == libc::SIGKILL {
            return write!(
                f,
                "THE GUEST IS LOST: it was killed (SIGKILL, by hand or for want of memory) and no \
                 spare was ready to go on with it; start it again with `hotspare run`"
            );
        }
        write!(f, "the guest was ended by {signal}")?;
        match self.since_takeover.filter(|since| *since < SOON) {
            Some(since) => write!(
                f,
                " {:.1} s after this host took it over: it may not have survived the move; see \
                 LIMITS.md for what changes",
                since.as_secs_f64()
            ),
            None => Ok(()),
        }
    }
}

/// A committed checkpoint.
#[derive(Clone, Copy, Debug, Default)]
pub struct EpochLine {
    /// Its number.
    pub epoch: u64,
    /// How long the guest was stopped, and with what.
    pub parts: PauseParts,
    /// `CLOCK_MONOTONIC` of the host while it was stopped, ns.
    pub stop_ns: u64,
    /// Pages that were sent.
    pub pages: u64,
    /// Bytes on the wire since the checkpoint before was committed.
    pub bytes: u64,
    /// Checkpoints the slowest spare is behind.
    pub lag: u64,
    /// Output that had waited for it.
    pub output: GateStats,
}

impl Reporter {
    /// Tells in JSON, or in words.
    pub fn new(json: bool) -> Self {
        let (listeners, _) = broadcast::channel(HAPPENINGS_MAX);
        Self { json, journal: writes_to_journal(), status: Arc::default(), listeners }
    }

    fn line(&self, text: &str) {
        // A reader that went away does not end the guest.
        let _ = writeln!(std::io::stdout().lock(), "{text}");
    }

    /// Says something in passing, on standard error.
    pub fn note(&self, text: &str) {
        self.say(Weight::Notice, text);
    }

    /// Says something that surprises.
    pub fn warn(&self, text: &str) {
        self.say(Weight::Warning, text);
    }

    /// Says something that somebody must look at.
    pub fn alarm(&self, text: &str) {
        self.say(Weight::Error, text);
    }

    /// What happens from now on.
    pub fn listen(&self) -> broadcast::Receiver<Happening> {
        self.listeners.subscribe()
    }

    /// Tells those who listen. Waits for nobody.
    pub fn tell(&self, news: impl FnOnce() -> News) {
        if self.listeners.receiver_count() > 0 {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let _ =
                self.listeners.send(Happening { wall_ms: now.as_millis() as u64, news: news() });
        }
    }

    fn say(&self, weight: Weight, text: &str) {
        self.tell(|| News::Note(weight, text.to_owned()));
        if self.journal {
            // All of it at once, or others' lines come in between.
            write_or_lose(&for_journal(weight, text));
            return;
        }
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        let after_status = if std::mem::take(&mut status.shown) { "\n" } else { "" };
        write_or_lose(&format!("{after_status}hotspare: {text}\n"));
    }

    /// A spare holds a whole checkpoint.
    pub fn protected(&self, epoch: u64) {
        if self.json {
            self.line(&json!({"event": "protected", "epoch": epoch}).to_string());
        } else {
            self.note(&format!("protected from epoch {epoch} on"));
        }
    }

    /// A guest that was restored has all its memory.
    pub fn loaded(&self, guest: &str, loaded: &Loaded) {
        let waits = loaded.missed.len() as u64 + loaded.late;
        if self.json {
            let told = json!({
                "event": "loaded", "bytes_before": loaded.before,
                "bytes_behind": loaded.bytes - loaded.before, "seconds": loaded.took.as_secs_f64(),
                "before_seconds": loaded.until_start.as_secs_f64(),
                "unforeseen": loaded.missed.len(), "pointed": loaded.pointed, "waits": waits,
                "waited_seconds": loaded.waited.as_secs_f64(),
            });
            self.line(&told.to_string());
        }
        self.note(&format!(
            "guest {guest} has all its memory: {} came behind it in {:.1} s; it waited {waits} \
             times",
            size(loaded.bytes - loaded.before),
            (loaded.took - loaded.until_start).as_secs_f64()
        ));
    }

    /// What the guest touches was tracked in a window; clearing and looking in processor time.
    pub fn tracked(&self, pages: u64, clearing: Duration, looking: Duration, lasted: Duration) {
        tracing::debug!(pages, ?clearing, ?looking, ?lasted, "touched");
        if self.json {
            let ms = |time: Duration| time.as_secs_f64() * 1000.0;
            let told = json!({
                "event": "tracked", "pages": pages, "clearing_ms": ms(clearing),
                "looking_ms": ms(looking), "window_ms": ms(lasted),
            });
            self.line(&told.to_string());
        }
    }

    /// No spare could take over.
    pub fn unprotected(&self) {
        if self.json {
            self.line(&json!({"event": "unprotected"}).to_string());
        } else {
            self.alarm("UNPROTECTED: no spare could take over; start one with `hotspare spare`");
        }
    }

    /// There has been no checkpoint for a while.
    pub fn late(&self, why: &str, epoch: u64) {
        if self.json {
            self.line(&json!({"event": "late", "why": why, "epoch": epoch}).to_string());
        } else {
            self.alarm(&format!(
                "NOT PROTECTED since more than a second, the guest runs on: {why}. A spare could \
                 only go on from epoch {epoch}"
            ));
        }
    }

    /// A checkpoint is committed.
    pub fn epoch(&self, epoch: &EpochLine) {
        self.tell(|| News::Epoch(*epoch));
        let us = |part: Duration| part.as_nanos() as f64 / 1000.0;
        let parts = &epoch.parts;
        let pause_us = us(parts.total);
        {
            let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
            status.pauses_us.push_back(pause_us);
            if status.pauses_us.len() > PAUSES_KEPT {
                status.pauses_us.pop_front();
            }
        }
        if self.json {
            self.line(
                &json!({
                    "event": "epoch", "epoch": epoch.epoch, "pause_us": pause_us,
                    "stop_us": us(parts.stop), "scan_us": us(parts.scan),
                    "copy_us": us(parts.copy), "registers_us": us(parts.registers),
                    "objects_us": us(parts.objects), "files_us": us(parts.files),
                    "resume_us": us(parts.resume), "stop_ns": epoch.stop_ns,
                    "pages": epoch.pages, "bytes": epoch.bytes, "lag": epoch.lag,
                    "output_packets": epoch.output.released,
                    "output_wait_us": us(epoch.output.mean()),
                    "output_wait_max_us": us(epoch.output.waited_max),
                })
                .to_string(),
            );
            return;
        }
        let (p50, p99) = self.pauses_us();
        self.show(&format!(
            "epoch {}  pause p50 {} p99 {}  {} pages  {}  {}",
            epoch.epoch,
            time(p50),
            time(p99),
            epoch.pages,
            size(epoch.bytes),
            match epoch.lag {
                0 => "spare up to date".to_owned(),
                lag => format!("spare {lag} behind"),
            }
        ));
    }

    /// How far the first copy to a spare is, in pages.
    pub fn copying(&self, done: u64, all: u64) {
        if self.json {
            return;
        }
        let (done, all) = (done.min(all), all.max(1));
        let percent = done * 100 / all;
        let (done, all) = (size(done * 4096), size(all * 4096));
        let text = format!("full copy to the spare: {percent} % ({done} of {all})");
        self.show(&text);
        let is_long = {
            let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
            let told = *status.told_copy.get_or_insert_with(Instant::now);
            let is_long = told.elapsed() >= LONG && !std::io::stderr().is_terminal();
            if is_long {
                status.told_copy = Some(Instant::now());
            }
            is_long
        };
        if is_long {
            self.note(&text);
        }
    }

    /// Median and 99th percentile of the last pauses, µs.
    pub fn pauses_us(&self) -> (f64, f64) {
        let status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sorted: Vec<f64> = status.pauses_us.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let at = |share: usize| match sorted.len() {
            0 => 0.0,
            length => sorted[(length - 1) * share / 100],
        };
        (at(50), at(99))
    }

    /// Replaces the line at the bottom, on a terminal; elsewhere it would only fill a log.
    fn show(&self, text: &str) {
        if !std::io::stderr().is_terminal() {
            return;
        }
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        if status.changed.is_some_and(|changed| changed.elapsed() < REFRESH) {
            return;
        }
        status.changed = Some(Instant::now());
        status.shown = true;
        // A line that wraps could not be replaced.
        let text: String = text.chars().take(columns().saturating_sub(1)).collect();
        write_or_lose(&format!("\r\x1b[K{text}"));
    }

    /// The ghost runs.
    pub fn failover(&self, failover: &Failover) {
        let ms = |part: Duration| part.as_secs_f64() * 1000.0;
        if self.json {
            self.line(
                &json!({
                    "event": "failover", "detect_ms": ms(failover.detect),
                    "apply_ms": ms(failover.apply),
                    "finalise_ms": ms(failover.finalise), "address_ms": ms(failover.address),
                    "epoch": failover.epoch, "term": failover.term,
                })
                .to_string(),
            );
            return;
        }
        self.warn(&format!(
            "took over in term {} from epoch {}: detect {:.1} ms, apply {:.1} ms, \
             finalise {:.1} ms, address {:.1} ms",
            failover.term,
            failover.epoch,
            ms(failover.detect),
            ms(failover.apply),
            ms(failover.finalise),
            ms(failover.address)
        ));
    }

    /// A guest from the store runs.
    pub fn restored(&self, failover: &Failover, stale: &Stale, took: Duration) {
        let (age_s, took_ms) = (stale.age.as_secs_f64(), took.as_secs_f64() * 1000.0);
        if self.json {
            let line = json!({
                "event": "restored", "epoch": failover.epoch, "age_s": age_s, "took_ms": took_ms,
            });
            self.line(&line.to_string());
            return;
        }
        self.warn(&format!(
            "the guest runs from stored checkpoint {}, which is {age_s:.1} s old; bringing it back \
             took {took_ms:.0} ms",
            failover.epoch
        ));
    }

    /// The guest has ended.
    pub fn end(&self, end: &End) {
        if self.json {
            self.line(&json!({"event": "exit", "status": end.code}).to_string());
        }
        self.note(&end.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_in_the_journal_has_its_priority() {
        assert_eq!(for_journal(Weight::Error, "one\ntwo"), "<3>one\n<3>two\n");
        assert_eq!(for_journal(Weight::Notice, "one"), "<5>one\n");
    }
}
