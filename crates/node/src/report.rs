//! What the program says while it works: lines for people, or JSON for machines.

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hotspare_process::capture::PauseParts;
use serde_json::json;

/// Tells what happens. Cheap to clone.
#[derive(Clone)]
pub struct Reporter {
    json: bool,
    status: Arc<Mutex<StatusLine>>,
}

#[derive(Default)]
struct StatusLine {
    shown: bool,
    pauses_us: Vec<f64>,
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
}

impl Reporter {
    /// Tells in JSON, or in words.
    pub fn new(json: bool) -> Self {
        Self { json, status: Arc::default() }
    }

    fn line(&self, text: &str) {
        // A reader that went away does not end the guest.
        let _ = writeln!(std::io::stdout().lock(), "{text}");
    }

    /// Says something in passing, on standard error.
    pub fn note(&self, text: &str) {
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::take(&mut status.shown) {
            eprintln!();
        }
        eprintln!("hotspare: {text}");
    }

    /// A spare holds a whole checkpoint.
    pub fn protected(&self, epoch: u64) {
        if self.json {
            self.line(&json!({"event": "protected", "epoch": epoch}).to_string());
        } else {
            self.note(&format!("protected from epoch {epoch} on"));
        }
    }

    /// No spare could take over.
    pub fn unprotected(&self) {
        if self.json {
            self.line(&json!({"event": "unprotected"}).to_string());
        } else {
            self.note("UNPROTECTED: no spare could take over; start one with `hotspare spare`");
        }
    }

    /// There has been no checkpoint for a while.
    pub fn late(&self, why: &str, epoch: u64) {
        if self.json {
            self.line(&json!({"event": "late", "why": why, "epoch": epoch}).to_string());
        } else {
            self.note(&format!(
                "NOT PROTECTED since more than a second, the guest runs on: {why}. A spare could \
                 only go on from epoch {epoch}"
            ));
        }
    }

    /// A checkpoint is committed.
    pub fn epoch(&self, epoch: &EpochLine) {
        let us = |part: Duration| part.as_nanos() as f64 / 1000.0;
        let parts = &epoch.parts;
        let pause_us = us(parts.total);
        if self.json {
            self.line(
                &json!({
                    "event": "epoch", "epoch": epoch.epoch, "pause_us": pause_us,
                    "stop_us": us(parts.stop), "scan_us": us(parts.scan),
                    "copy_us": us(parts.copy), "registers_us": us(parts.registers),
                    "objects_us": us(parts.objects), "files_us": us(parts.files),
                    "resume_us": us(parts.resume), "stop_ns": epoch.stop_ns,
                    "pages": epoch.pages, "bytes": epoch.bytes, "lag": epoch.lag,
                })
                .to_string(),
            );
            return;
        }
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.pauses_us.push(pause_us);
        if status.pauses_us.len() > 600 {
            status.pauses_us.remove(0);
        }
        let mut sorted = status.pauses_us.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |share: usize| sorted[(sorted.len() - 1) * share / 100];
        eprint!(
            "\r\x1b[Kepoch {}  pause p50 {:.0} µs p99 {:.0} µs  {} pages  {} KiB  lag {}",
            epoch.epoch,
            at(50),
            at(99),
            epoch.pages,
            epoch.bytes / 1024,
            epoch.lag
        );
        status.shown = true;
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
        self.note(&format!(
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

    /// The guest has ended.
    pub fn end(&self, end: &End) {
        if self.json {
            self.line(&json!({"event": "exit", "status": end.code}).to_string());
        }
        self.note(&end.to_string());
    }
}
