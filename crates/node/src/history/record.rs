//! What a history is made of.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hotspare_image::NodeId;
use serde::{Deserialize, Serialize};

use crate::rehearsal::Report;
use crate::report::{Failover, size};
use crate::settings::Guarantee;

/// Something that happened to a guest's protection, as this host saw it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Time of day, UTC, for people.
    pub at: String,
    /// The same in milliseconds since 1970.
    pub wall_ms: u64,
    /// `CLOCK_MONOTONIC` of this host: what a step of the time of day does not change …
    pub monotonic_ns: u64,
    /// … of this boot.
    pub boot: String,
    /// Name of the host.
    pub host: String,
    /// The agent, as heartbeats name it.
    pub node: String,
    /// Its process.
    pub pid: u32,
    /// The guest.
    pub guest: String,
    /// Reign at that time.
    pub term: u64,
    /// The last checkpoint that counts in this.
    pub epoch: u64,
    /// Records of lesser weight before this one that were too many to keep.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u64,
    /// What happened.
    #[serde(flatten)]
    pub what: What,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum What {
    /// The guest was started here.
    Started,
    /// A spare could take over from now on.
    Protected,
    /// No spare could take over any more.
    Unprotected {
        /// As far as the primary knows.
        why: String,
    },
    /// No checkpoint for more than a second.
    Late {
        /// What was in the way.
        why: String,
    },
    /// A checkpoint is impossible at this time.
    Refused {
        /// What cannot be protected.
        why: String,
    },
    /// Checkpoints are possible again.
    Accepted,
    /// The operator has paused protection.
    Paused {
        /// The reason given.
        why: String,
    },
    /// The operator wants protection again.
    Resumed,
    /// This host has taken over from a primary that is gone.
    Failover {
        /// What was detected.
        cause: String,
        /// Parts of the outage, ms: from the last sign of life of the primary to the decision …
        detect_ms: f64,
        /// … applying the checkpoints that had arrived by then …
        apply_ms: f64,
        /// … until the ghost was ready to run …
        finalise_ms: f64,
        /// … taking the address and letting go.
        address_ms: f64,
        /// What did not survive.
        #[serde(flatten)]
        loss: Loss,
    },
    /// This host was to take over and could not.
    TakeoverFailed {
        /// The error.
        why: String,
    },
    /// The primary is gone, and this spare must not replace it.
    Abandoned {
        /// The reason.
        why: String,
    },
    /// The guest has moved to this host as planned. Nothing is lost.
    SwitchedHere {
        /// As for a failover.
        finalise_ms: f64,
        /// As for a failover.
        address_ms: f64,
    },
    /// The guest has moved away as planned. Nothing is lost.
    SwitchedAway {
        /// From its stop here until the word that it runs there.
        stall_ms: f64,
    },
    /// A switchover came to nothing; the guest runs on here.
    NotSwitched {
        /// The reason.
        why: String,
    },
    /// This host must not run the guest any more: it was stopped here.
    Fenced {
        /// What was detected.
        cause: String,
    },
    /// A copy of the ghost was let run, cut off, and looked at.
    Rehearsed(Box<Report>),
    /// A rehearsal was given up, which says nothing about the ghost.
    NotRehearsed {
        /// The reason.
        why: String,
    },
    /// Checkpoints are stored from now on.
    Stored {
        /// Of the first.
        bytes: u64,
    },
    /// Checkpoints cannot be stored at this time.
    NotStored {
        /// What is in the way.
        why: String,
    },
    /// The guest was started here from a stored checkpoint.
    Restored {
        /// The store.
        from: String,
        /// How old the checkpoint was, s.
        age_s: f64,
        /// From the command to a guest that runs, ms.
        took_ms: f64,
    },
    /// The guest has ended.
    Ended {
        /// As a shell gives it.
        status: u8,
        /// In words.
        how: String,
    },
}

impl What {
    /// A takeover that succeeded: for a `cause`, or as planned.
    pub fn takeover(failover: &Failover, cause: Option<(&str, Loss)>) -> What {
        let (finalise_ms, address_ms) = (ms(failover.finalise), ms(failover.address));
        let Some((cause, loss)) = cause else {
            return What::SwitchedHere { finalise_ms, address_ms };
        };
        What::Failover {
            cause: cause.to_owned(),
            detect_ms: ms(failover.detect),
            apply_ms: ms(failover.apply),
            finalise_ms,
            address_ms,
            loss,
        }
    }

    /// Whether many of them may come when something flaps.
    pub fn is_minor(&self) -> bool {
        matches!(self, What::Late { .. } | What::Refused { .. } | What::Accepted)
    }
}

/// What a failover has cost, under the guarantee in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Loss {
    /// The guarantee.
    pub guarantee: String,
    /// How old the checkpoint was when the primary was given up, ms: since this host had it whole.
    /// Besides, it had been on its way.
    pub epoch_age_ms: f64,
    /// In words.
    pub lost: String,
}

impl Loss {
    /// Of a failover. `is_certain`: the old primary is known to run the guest no more.
    pub fn new(guarantee: Guarantee, epoch: u64, age: Duration, is_certain: bool) -> Self {
        let epoch_age_ms = ms(age);
        let mut lost = match guarantee {
            Guarantee::Timeline => format!(
                "what the guest did after checkpoint {epoch}, which this host had for \
                 {epoch_age_ms:.1} ms when it gave the primary up"
            ),
            Guarantee::OutputCommit => "nothing that a client had been told".to_owned(),
        };
        if !is_certain {
            lost += "; besides, what the old primary does if it lives on, cut off";
        }
        Self { guarantee: guarantee.to_string(), epoch_age_ms, lost }
    }
}

/// Milliseconds to a thousandth.
pub fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

impl Record {
    /// Of something that happens now.
    pub fn now(
        host: &str,
        node: NodeId,
        guest: &str,
        (term, epoch): (u64, u64),
        what: What,
    ) -> Self {
        let wall = now();
        let monotonic = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
        let monotonic = monotonic.map_or(Duration::ZERO, Duration::from);
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        Self {
            at: utc(wall),
            wall_ms: wall.as_millis() as u64,
            monotonic_ns: monotonic.as_nanos() as u64,
            boot: boot.unwrap_or_default().trim().to_owned(),
            host: host.to_owned(),
            node: format!("{:016x}", node.0),
            pid: std::process::id(),
            guest: guest.to_owned(),
            term,
            epoch,
            left_out: 0,
            what,
        }
    }

    /// One line, without its end.
    pub fn to_line(&self) -> String {
        serde_json::to_string(self).expect("text, numbers and names have a JSON form")
    }

    /// What happened, in a word.
    pub fn event(&self) -> String {
        let value = serde_json::to_value(&self.what).unwrap_or_default();
        value["event"].as_str().unwrap_or_default().to_owned()
    }

    /// What happened, in a sentence.
    pub fn words(&self) -> String {
        let words = match &self.what {
            What::Started => "started here".to_owned(),
            What::Protected => "PROTECTED: a spare could take over from here on".to_owned(),
            What::Unprotected { why } => format!("UNPROTECTED: {why}"),
            What::Late { why } => format!("no checkpoint for more than a second: {why}"),
            What::Refused { why } => format!("cannot be protected at this time: {why}"),
            What::Accepted => "can be protected again".to_owned(),
            What::Paused { why } => format!("PROTECTION PAUSED by hand: {why}"),
            What::Resumed => "protection resumed by hand".to_owned(),
            What::Failover { cause, detect_ms, apply_ms, finalise_ms, address_ms, loss } => {
                let all = detect_ms + apply_ms + finalise_ms + address_ms;
                format!(
                    "FAILOVER to this host: {cause}; it ran again after {all:.1} ms (detect \
                     {detect_ms:.1}, apply {apply_ms:.1}, finalise {finalise_ms:.1}, address \
                     {address_ms:.1}); lost under {}: {}",
                    loss.guarantee, loss.lost
                )
            }
            What::TakeoverFailed { why } => format!("TAKEOVER FAILED here: {why}"),
            What::Abandoned { why } => {
                format!("THE PRIMARY IS GONE and this spare must not replace it: {why}")
            }
            What::SwitchedHere { finalise_ms, address_ms } => format!(
                "switchover to this host (finalise {finalise_ms:.1} ms, address \
                 {address_ms:.1} ms); nothing lost"
            ),
            What::SwitchedAway { stall_ms } => {
                format!(
                    "switchover to the spare: it stood still for {stall_ms:.1} ms; nothing lost"
                )
            }
            What::NotSwitched { why } => format!("no switchover: {why}"),
            What::Fenced { cause } => format!("FENCED, stopped here: {cause}"),
            What::Rehearsed(report) => report.words(),
            What::NotRehearsed { why } => format!("a rehearsal was given up: {why}"),
            What::Stored { bytes } => {
                format!("checkpoints are stored, from a first of {} on", size(*bytes))
            }
            What::NotStored { why } => format!("CHECKPOINTS ARE NOT STORED: {why}"),
            What::Restored { from, age_s, took_ms } => format!(
                "RESTORED here from {from}, as it was {age_s:.1} s before; that took {took_ms:.0} \
                 ms"
            ),
            What::Ended { how, .. } => how.clone(),
        };
        match self.left_out {
            0 => words,
            more => format!("{words} (and {more} more of the kind since the last one)"),
        }
    }
}

/// `2026-11-22T10:46:03.123Z` of a time since 1970. The calendar of the proleptic Gregorian years,
/// counted in eras of 400 years that begin in March, so that the leap day ends a year.
pub fn utc(since_1970: Duration) -> String {
    let seconds = since_1970.as_secs();
    let days = seconds / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let leaps = day_of_era / 1460 + day_of_era / 146_096 - day_of_era / 36_524;
    let year_of_era = (day_of_era - leaps) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let milli = since_1970.subsec_millis();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
}

/// Milliseconds since 1970 of what [`utc`] writes: `YYYY-MM-DDTHH:MM:SS[.mmm][Z]`, also with a
/// space.
pub fn utc_ms(text: &str) -> Option<u64> {
    let (date, time) = text.trim_end_matches('Z').split_once(['T', ' '])?;
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let number = |text: &str| text.parse::<i64>().ok().filter(|number| *number >= 0);
    let date: Vec<i64> = date.split('-').map(number).collect::<Option<_>>()?;
    let time: Vec<i64> = time.split(':').map(number).collect::<Option<_>>()?;
    let ([year, month, day], [hour, minute, second]) = (&date[..], &time[..]) else { return None };
    let in_range = (1970..10_000).contains(year)
        && (1..=12).contains(month)
        && (1..=31).contains(day)
        && *hour < 24
        && *minute < 60
        && *second < 60;
    if !in_range || fraction.len() > 3 {
        return None;
    }
    // Days before a date, with years that begin in March.
    let (year, month) = if *month < 3 { (year - 1, month + 9) } else { (*year, month - 3) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1;
    let seconds = ((days - 719_468) * 24 + hour) * 3600 + minute * 60 + second;
    let ms = format!("{fraction:0<3}").parse::<i64>().ok()?;
    u64::try_from(seconds * 1000 + ms).ok()
}

/// Since 1970.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    now().as_millis() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_day_are_those_of_the_calendar() {
        // From `date -u -d @N +%FT%T`.
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399, "2000-02-28T23:59:59.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (1_709_251_200, "2024-03-01T00:00:00.000Z"),
            (1_795_344_363, "2026-11-22T10:46:03.000Z"),
            (4_107_542_399, "2100-02-28T23:59:59.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(utc(Duration::from_secs(seconds)), text, "{seconds}");
        }
    }

    #[test]
    fn a_time_of_day_may_be_written_shorter() {
        // date -ud 2026-11-22T18:30:05 +%s
        assert_eq!(utc_ms("2026-11-22T18:30:05Z"), Some(1_795_372_205_000));
        assert_eq!(utc_ms("2026-11-22 18:30:05.25"), Some(1_795_372_205_250));
        assert_eq!(utc_ms("1970-01-01T00:00:00"), Some(0));
        for wrong in ["", "2026-11-22", "2026-13-01T00:00:00", "2026-11-22T25:00:00", "x"] {
            assert_eq!(utc_ms(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_time_of_day_survives_its_text() {
        // Nearly a week apart, so that each day and time comes by, up to the year 9999.
        for ms in (0..253_402_300_800_000).step_by(604_799_999) {
            let text = utc(Duration::from_millis(ms));
            assert_eq!(utc_ms(&text), Some(ms), "{text}");
        }
    }

    #[test]
    fn a_record_survives_its_line() {
        let failover = Failover { detect: Duration::from_millis(92), ..Failover::default() };
        let loss = Loss::new(Guarantee::Timeline, 17, Duration::from_micros(41_500), false);
        let what = What::takeover(&failover, Some(("silence", loss)));
        let record = Record::now("beta", NodeId(7), "redis", (2, 17), what);
        let read: Record = serde_json::from_str(&record.to_line()).unwrap();
        assert_eq!(read, record);
        let words = record.words();
        for part in ["silence", "detect 92.0", "timeline", "checkpoint 17", "41.5 ms", "cut off"] {
            assert!(words.contains(part), "{part}: {words}");
        }
    }

    #[test]
    fn a_rehearsal_survives_its_line() {
        let report = Report { at_epoch: 17, ran_ms: 1000.0, ..Report::default() };
        let report = report.judge(Some("the probe ended with status 1".into()), 2);
        let what = What::Rehearsed(Box::new(report));
        let record = Record::now("beta", NodeId(7), "redis", (2, 17), what);
        let read: Record = serde_json::from_str(&record.to_line()).unwrap();
        assert_eq!((read.event().as_str(), &read), ("rehearsed", &record));
        assert!(record.words().contains("REHEARSAL FAILED: the probe ended"));
    }

    #[test]
    fn output_that_waited_was_not_lost() {
        let loss = Loss::new(Guarantee::OutputCommit, 17, Duration::ZERO, true);
        assert_eq!(loss.lost, "nothing that a client had been told");
    }
}
