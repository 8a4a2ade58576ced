//! `hotspare demo`: a Redis is killed under load and goes on elsewhere, with all that a person
//! wants to know about it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::Lab;
use crate::clients::{
    LaneRecord, Load, Outcome, Pace, Protocol, Reply, StoreLane, StorePlan, Verdict, verify,
};
use crate::clock::{Instant, millis};
use crate::dice::Dice;
use crate::lab::{LabError, SERVICE_CIDR, SERVICE_V4};
use crate::picture::{Part, Picture};
use crate::protected::{Committed, Engine, Failover, HANG};

const PORT: u16 = 6379;
/// Load before the kill and after, at least.
const CALM: Duration = Duration::from_millis(2500);

/// What the demo does.
#[derive(Clone, Debug)]
pub struct DemoOptions {
    /// The `hotspare` program.
    pub hotspare: PathBuf,
    /// Where the picture goes.
    pub picture: PathBuf,
    /// Keys in the Redis.
    pub keys: usize,
    /// Requests a second, a tenth of them writes.
    pub rate_per_s: f64,
    /// Between two checkpoints.
    pub epoch: Duration,
    /// Decides the instant of the kill.
    pub seed: u64,
    /// `--guarantee output-commit`: no connection may break, no write be lost.
    pub output_commit: bool,
}

impl DemoOptions {
    /// 100,000 keys, 2,000 requests a second, ten checkpoints a second.
    pub fn new(hotspare: PathBuf) -> DemoOptions {
        DemoOptions {
            hotspare,
            picture: PathBuf::from("hotspare-demo.svg"),
            keys: 100_000,
            rate_per_s: 2000.0,
            epoch: Duration::from_millis(100),
            seed: Instant::now().0,
            output_commit: false,
        }
    }

    /// With `--guarantee output-commit`, and as many requests as clients on eight connections get
    /// answered then, each of them waiting for a checkpoint.
    pub fn hold_output(&mut self) {
        (self.output_commit, self.rate_per_s) = (true, 400.0);
    }
}

/// Why there is no good demo.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// The hosts could not be made, or something did not happen.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// The picture cannot be written.
    #[error("write {}: {source}", path.display())]
    Picture {
        /// Where to.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A program that the demo needs is not there.
    #[error("{0} is not installed; `make setup` installs what the demo needs")]
    NotInstalled(&'static str),
    /// The failover is not what it should be.
    #[error("the failover went wrong:\n  {}", .0.join("\n  "))]
    Wrong(Vec<String>),
}

/// What was measured.
#[derive(Clone, Debug)]
pub struct DemoResult {
    /// The takeover, as the spare tells it.
    pub failover: Failover,
    /// Last reply before the death, first reply after.
    pub outage: Option<(Instant, Instant)>,
    /// When the primary died.
    pub death: Instant,
    /// What was done by then is part of the checkpoint that the ghost went on from, as far as is
    /// known.
    pub covered: Option<Instant>,
    /// What the clients say.
    pub verdict: Verdict,
    /// All requests.
    pub replies: Vec<Reply>,
    /// Connections that broke and were made anew.
    pub reconnects: u64,
}

/// Runs the demo, telling the story on `out`. An error if any promise was broken.
pub fn run(options: &DemoOptions, out: &mut dyn Write) -> Result<DemoResult, DemoError> {
    let keys = grouped(options.keys);
    tell(out, &format!("Two simulated hosts and a client; Redis with {keys} keys on host0."));
    let result = play(options, out)?;
    tell(out, &summary(options, &result));
    draw(options, &result)?;
    tell(out, &format!("\nReplies over time: {}", options.picture.display()));
    let mut wrongs = result.verdict.wrongs.clone();
    if options.output_commit {
        wrongs.extend(noticed(&result));
    }
    if result.outage.is_none() {
        wrongs.push("no reply after the death".to_owned());
    }
    if wrongs.is_empty() { Ok(result) } else { Err(DemoError::Wrong(wrongs)) }
}

/// What clients have noticed that they should not, where output is held.
fn noticed(result: &DemoResult) -> Vec<String> {
    let failed = result.replies.iter().filter(|reply| reply.outcome != Outcome::Good).count();
    let lost = result.verdict.lost.len();
    let each = [
        (result.reconnects, "connections broke"),
        (failed as u64, "requests had no good reply"),
        (lost as u64, "acknowledged writes were lost"),
    ];
    let some = each.iter().filter(|(count, _)| *count > 0);
    some.map(|(count, what)| format!("{count} {what}")).collect()
}

fn play(options: &DemoOptions, out: &mut dyn Write) -> Result<DemoResult, DemoError> {
    if Command::new("redis-server").arg("--version").output().is_err() {
        return Err(DemoError::NotInstalled("redis-server"));
    }
    let lab = Lab::new(2)?;
    let service_cidr = Some(SERVICE_CIDR.to_owned());
    let binary = options.hotspare.clone();
    let guarantee = if options.output_commit { "output-commit" } else { "timeline" };
    let more = vec!["--guarantee".to_owned(), guarantee.to_owned()];
    let engine = Engine { binary, epoch: options.epoch, service_cidr, replicated: vec![], more };
    let spare = engine.spare(lab.host(1))?;
    let primary = engine.run(lab.host(0), &[lab.host(1)], &redis())?;

    let mut pace = Pace { rate_per_s: options.rate_per_s, lanes: 8, ..Pace::default() };
    if options.output_commit {
        // Nobody connects anew: connections have to go on.
        pace.reply_at_most = HANG;
    }
    let plan = StorePlan {
        protocol: Protocol::Redis,
        keys: options.keys,
        value_bytes: 72,
        writes: 0.1,
        seed: options.seed,
    };
    let server = (SERVICE_V4, PORT).into();
    let sessions = plan.sessions(pace.lanes);
    let load = Load::start(lab.client(), server, pace, sessions, HANG);
    let epoch = Engine::protected(&primary)?;
    let rate = grouped(options.rate_per_s as usize);
    tell(out, &format!("Filled; {rate} requests/s, 10 % writes; protected since epoch {epoch}."));

    let wait = CALM + Dice::new(options.seed).between(Duration::ZERO, options.epoch);
    (Instant::now() + wait).sleep_until();
    tell(out, &format!("Killing host0 and all on it (seed {}).", options.seed));
    let death = lab.host(0).kill()?;
    let (failover, _) = Engine::taken_over(&spare)?;
    let covered = Committed::of(&primary).covers(failover.epoch);
    load.answered_after(death, HANG);
    (Instant::now() + CALM).sleep_until();

    let lanes = load.finish();
    let verdict = verify(&lanes, Some(death));
    let reconnects = lanes.iter().map(|lane| lane.reconnects).sum();
    let replies = all_replies(lanes);
    let outage = outage(&replies, death);
    Ok(DemoResult { failover, outage, death, covered, verdict, replies, reconnects })
}

fn redis() -> Vec<String> {
    let port = PORT.to_string();
    let words = ["redis-server", "--port", &port, "--bind", "*", "-::*", "--save", ""];
    let more = ["--appendonly", "no", "--protected-mode", "no"];
    words.iter().chain(&more).map(|word| (*word).to_owned()).collect()
}

fn all_replies(lanes: Vec<LaneRecord<StoreLane>>) -> Vec<Reply> {
    let mut replies: Vec<Reply> = lanes.into_iter().flat_map(|lane| lane.replies).collect();
    replies.sort_by_key(|reply| reply.done);
    replies
}

/// The longest time without a good reply between `death` and the first reply to a request from
/// after it: its beginning and end. Where connections go on, requests from before the death are
/// answered after it. `replies` are in the order of their arrival.
pub fn outage(replies: &[Reply], death: Instant) -> Option<(Instant, Instant)> {
    let good = || replies.iter().filter(|reply| reply.outcome == Outcome::Good);
    let first = good().find(|reply| reply.sent > death)?.done;
    let done = good().map(|reply| reply.done);
    let gaps = done.clone().zip(done.skip(1));
    let around = gaps.filter(|(_, end)| *end > death && *end <= first);
    around.max_by_key(|(start, end)| end.since(*start))
}

/// The named parts of the time between death and first reply.
fn parts(result: &DemoResult) -> Vec<Part> {
    let Some((_, first)) = result.outage else { return vec![] };
    let Failover { detect_ms, apply_ms, finalise_ms, address_ms, .. } = result.failover;
    let whole = millis(first.since(result.death));
    let rest = (whole - detect_ms - apply_ms - finalise_ms - address_ms).max(0.0);
    let part = |name, ms: f64| Part { name, length: Duration::from_secs_f64(ms.max(0.0) / 1e3) };
    vec![
        part("detect", detect_ms),
        part("apply", apply_ms),
        part("finalise", finalise_ms),
        part("address", address_ms),
        part("first reply", rest),
    ]
}

fn summary(options: &DemoOptions, result: &DemoResult) -> String {
    let mut lines = vec![String::new()];
    let mut row = |name: &str, value: String, remark: &str| {
        lines.push(format!("{name:<22}{value:>12}   {remark}").trim_end().to_owned());
    };
    if let Some((last, first)) = result.outage {
        let remark = "from the last reply before the death to the first after it";
        row("Outage", ms(millis(first.since(last))), remark);
    }
    let remarks = [
        "until the spare was sure that the primary is dead",
        "until the checkpoints that had arrived were in the ghost",
        "until the ghost was ready to run",
        "until the service address was its own",
        "until a client had connected anew and had a reply",
    ];
    for (part, remark) in parts(result).iter().zip(remarks) {
        row(&format!("  {}", part.name), ms(millis(part.length)), remark);
    }
    let verdict = &result.verdict;
    let (verified, keys) = (grouped(verdict.keys_verified), grouped(options.keys));
    row("Keys verified", verified, &format!("of {keys}"));
    row("Writes acknowledged", grouped(verdict.writes_acknowledged), "");
    let oldest = verdict.oldest_loss_before(result.death).map_or(String::new(), |oldest| {
        let epoch = options.epoch.as_millis();
        format!("the oldest {:.0} ms before the death; an epoch is {epoch} ms", millis(oldest))
    });
    row("Writes lost", grouped(verdict.lost.len()), &oldest);
    if let Some(covered) = result.covered {
        let age = millis(result.death.since(covered));
        row("Checkpoint's age", ms(age), "at the death, from the stop of the guest for it");
    }
    row("Wrong replies", grouped(verdict.wrongs.len()), "");
    let failed = result.replies.iter().filter(|reply| reply.outcome != Outcome::Good).count();
    let remark = format!("{} connections were made anew", result.reconnects);
    row("Requests failed", grouped(failed), &remark);
    let calm = |reply: &&Reply| reply.outcome == Outcome::Good && reply.done <= result.death;
    let mut latencies: Vec<f64> =
        result.replies.iter().filter(calm).map(|reply| millis(reply.latency())).collect();
    latencies.sort_by(f64::total_cmp);
    if let [.., most] = latencies[..] {
        let at = |part: f64| latencies[((latencies.len() - 1) as f64 * part) as usize];
        let remark = format!("median while protected; p99 {:.2} ms, max {most:.1} ms", at(0.99));
        row("Latency", format!("{:.2} ms", at(0.5)), &remark);
    }
    lines.join("\n")
}

fn draw(options: &DemoOptions, result: &DemoResult) -> Result<(), DemoError> {
    let keys = grouped(options.keys);
    let rate = grouped(options.rate_per_s as usize);
    let (verified, lost) = (result.verdict.keys_verified, result.verdict.lost.len());
    let picture = Picture {
        title: format!("Redis with {keys} keys: its host dies, the ghost on the spare goes on"),
        subtitle: format!(
            "{rate} requests/s on 8 connections, a checkpoint every {} ms; {} keys verified, \
             {lost} writes lost",
            options.epoch.as_millis(),
            grouped(verified)
        ),
        replies: &result.replies,
        death: result.death,
        outage: result.outage,
        parts: parts(result),
        before: Duration::from_secs(2),
        after: Duration::from_secs(2),
    };
    write(&options.picture, &picture.svg())
}

fn write(path: &Path, svg: &str) -> Result<(), DemoError> {
    let failed = |source| DemoError::Picture { path: path.to_owned(), source };
    std::fs::write(path, svg).map_err(failed)
}

fn tell(out: &mut dyn Write, line: &str) {
    // A reader that has gone away misses the story; the demo goes on.
    let _ = writeln!(out, "{line}");
}

fn ms(millis: f64) -> String {
    format!("{millis:.1} ms")
}

/// A number with commas between thousands.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(sent: u64, done: u64, outcome: Outcome) -> Reply {
        Reply { due: Instant(sent), sent: Instant(sent), done: Instant(done), outcome }
    }

    #[test]
    fn numbers_have_commas() {
        assert_eq!(["7", "999", "1,000", "100,000"], [7, 999, 1000, 100_000].map(grouped)[..]);
    }

    #[test]
    fn an_outage_is_from_the_last_reply_before_to_the_first_after() {
        use Outcome::{Good, Lost};
        let replies = [
            reply(1, 2, Good),
            reply(8, 9, Good),
            // Sent before the death, read after it.
            reply(9, 11, Good),
            reply(9, 13, Lost),
            reply(14, 20, Good),
            reply(21, 22, Good),
        ];
        assert_eq!(outage(&replies, Instant(10)), Some((Instant(11), Instant(20))));
        assert_eq!(outage(&replies[..4], Instant(10)), None);
    }
}
