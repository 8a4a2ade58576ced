//! Scenarios as files: what they may say, and what is wrong with one.

use std::fmt::Write;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use hotspare_kernel::kill_point::{KillPoint, Role};
use hotspare_torture::campaign::PROGRAMS;
use hotspare_torture::fleet::Pace;
use hotspare_torture::lab::wire::Weather;
use hotspare_torture::scenario::{Fault, Invariants, Load, Place, Scenario, What, When};
use serde::Deserialize;
use toml::Spanned;

/// A whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    name: Option<String>,
    programs: Vec<Spanned<String>>,
    #[serde(default = "two")]
    hosts: Spanned<usize>,
    guarantee: Option<Spanned<String>>,
    path: Option<Spanned<String>>,
    #[serde(default)]
    store: bool,
    #[serde(default = "a_hundred")]
    epoch_ms: u64,
    #[serde(default = "ninety")]
    silence_ms: Spanned<u64>,
    #[serde(default = "one")]
    seed: u64,
    duration_s: Spanned<f64>,
    load: Option<LoadText>,
    #[serde(default)]
    fault: Vec<Spanned<FaultText>>,
    invariants: Option<Spanned<InvariantText>>,
}

fn two() -> Spanned<usize> {
    Spanned::new(0..0, 2)
}

fn ninety() -> Spanned<u64> {
    Spanned::new(0..0, 90)
}

fn a_hundred() -> u64 {
    100
}

fn one() -> u64 {
    1
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LoadText {
    connections: Option<usize>,
    callers: Option<usize>,
    pace: Option<Spanned<PaceText>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum PaceText {
    PerSecond(u32),
    Word(String),
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct FaultText {
    kind: String,
    at: Option<String>,
    to: Option<String>,
    both: Option<bool>,
    at_s: Option<f64>,
    every_s: Option<f64>,
    for_ms: Option<SpanText>,
    delay_ms: Option<f64>,
    jitter_ms: Option<f64>,
    share: Option<f64>,
    point: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged)]
enum SpanText {
    One(f64),
    Two([f64; 2]),
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct InvariantText {
    resets: Option<Most>,
    errors: Option<Most>,
    lost: Option<Most>,
    duplicates: Option<Most>,
    wait_s: Option<f64>,
    linearizable: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Most {
    Count(u64),
    Word(String),
}

/// Reads a scenario. What is wrong with it is told with the line, and what to do.
pub fn read(path: &Path) -> Result<Scenario> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let name = path.file_stem().map(|name| name.to_string_lossy().into_owned());
    parse(&text, name.as_deref().unwrap_or("scenario"))
        .map_err(|error| anyhow!("{}: {error:#}", path.display()))
}

/// As [`read`], from a text.
pub fn parse(text: &str, name: &str) -> Result<Scenario> {
    let file: Text = toml::from_str(text)?;
    Reader { text }.scenario(file, name)
}

struct Reader<'a> {
    text: &'a str,
}

impl Reader<'_> {
    fn at(&self, span: Range<usize>, what: impl std::fmt::Display) -> anyhow::Error {
        let line = self.text[..span.start.min(self.text.len())].matches('\n').count() + 1;
        anyhow!("line {line}: {what}")
    }

    fn scenario(&self, file: Text, name: &str) -> Result<Scenario> {
        let program = |wanted: &Spanned<String>| {
            let known = PROGRAMS.iter().find(|known| known.starts_with(wanted.as_ref().as_str()));
            let what = || format!("no program {:?}; take of {PROGRAMS:?}", wanted.as_ref());
            known.copied().ok_or_else(|| self.at(wanted.span(), what()))
        };
        let programs: Vec<_> = file.programs.iter().map(program).collect::<Result<_>>()?;
        if programs.is_empty() {
            bail!("no program; write programs = [\"redis-server\"]");
        }
        if !(2..=4).contains(file.hosts.as_ref()) {
            bail!(self.at(file.hosts.span(), "2, 3 or 4 hosts; the arbiter has one of its own"));
        }
        if *file.silence_ms.as_ref() < 90 {
            bail!(self.at(file.silence_ms.span(), "agents refuse less than silence_ms = 90"));
        }
        let seconds = *file.duration_s.as_ref();
        if !(0.1..=86_400.0).contains(&seconds) {
            bail!(self.at(file.duration_s.span(), "give duration_s from 0.1 to 86400"));
        }
        let guarantees = ["output-commit", "timeline"];
        let guarantee = self.word(file.guarantee.as_ref(), &guarantees)?;
        let is_direct = self.word(file.path.as_ref(), &["spare", "direct"])? == "direct";
        let mut faults = Vec::new();
        for fault in &file.fault {
            let read = self.fault(fault.as_ref(), *file.hosts.as_ref());
            faults.extend(read.map_err(|error| self.at(fault.span(), format!("{error:#}")))?);
        }
        let invariants = self.invariants(file.invariants, guarantee)?;
        Ok(Scenario {
            name: file.name.unwrap_or_else(|| name.to_owned()),
            programs,
            hosts: *file.hosts.as_ref(),
            guarantee,
            is_direct: is_direct || guarantee == "timeline",
            stores: file.store,
            epoch: Duration::from_millis(file.epoch_ms),
            silence: Duration::from_millis(*file.silence_ms.as_ref()),
            seed: file.seed,
            duration: Duration::from_secs_f64(seconds),
            load: self.load(file.load)?,
            faults,
            invariants,
        })
    }

    /// One of these words; the first if nothing is said.
    fn word(&self, said: Option<&Spanned<String>>, known: &[&'static str]) -> Result<&'static str> {
        let Some(said) = said else { return Ok(known[0]) };
        let found = known.iter().find(|word| *word == said.as_ref());
        let what = || format!("{:?} is none of {known:?}", said.as_ref());
        found.copied().ok_or_else(|| self.at(said.span(), what()))
    }

    fn load(&self, load: Option<LoadText>) -> Result<Load> {
        let load = load.unwrap_or(LoadText { connections: None, callers: None, pace: None });
        let pace = match &load.pace {
            None => None,
            Some(pace) => match pace.as_ref() {
                PaceText::PerSecond(rate) => Some(Pace::PerSecond(*rate)),
                PaceText::Word(word) => match &**word {
                    "mixed" => None,
                    "idle" => Some(Pace::PerSecond(0)),
                    "saturated" => Some(Pace::Saturated),
                    word => {
                        let what = format!(
                            "{word:?}: give requests a second, \"idle\", \"saturated\" or \"mixed\""
                        );
                        bail!(self.at(pace.span(), what));
                    }
                },
            },
        };
        let (connections, callers) = (load.connections.unwrap_or(100), load.callers.unwrap_or(2));
        Ok(Load { connections: connections.max(1), callers, pace })
    }

    fn invariants(
        &self,
        said: Option<Spanned<InvariantText>>,
        guarantee: &str,
    ) -> Result<Invariants> {
        let is_exact = guarantee == "output-commit";
        // Clients of a timeline find the guest in the past, and new connections are lost.
        let most = is_exact.then_some(0);
        let mut invariants = Invariants {
            resets: most,
            errors: most,
            lost: most,
            duplicates: most,
            linearizable: is_exact,
            ..Invariants::default()
        };
        let Some(said) = said else { return Ok(invariants) };
        let (span, said) = (said.span(), said.into_inner());
        let places = [
            (&mut invariants.resets, said.resets),
            (&mut invariants.errors, said.errors),
            (&mut invariants.lost, said.lost),
            (&mut invariants.duplicates, said.duplicates),
        ];
        for (place, said) in places {
            match said {
                None => {}
                Some(Most::Count(count)) => *place = Some(count),
                Some(Most::Word(word)) if word == "any" => *place = None,
                Some(Most::Word(word)) => {
                    bail!(self.at(span, format!("{word:?}: give a number or \"any\"")));
                }
            }
        }
        if let Some(seconds) = said.wait_s {
            invariants.wait = Duration::from_secs_f64(seconds.clamp(0.05, 3600.0));
        }
        if let Some(linearizable) = said.linearizable {
            if linearizable && !is_exact {
                let what = "a guest with guarantee = \"timeline\" goes back in time, so no history \
                            is linearizable; take it out";
                bail!(self.at(span, what));
            }
            invariants.linearizable = linearizable;
        }
        Ok(invariants)
    }

    /// One fault; several for all kill points.
    fn fault(&self, said: &FaultText, hosts: usize) -> Result<Vec<Fault>> {
        let whats = what(said, hosts)?;
        let place = |word: &Option<String>, default: Place| match word.as_deref() {
            None => Ok(default),
            Some(word) => place(word),
        };
        let default = match whats[0] {
            What::Wire(_) | What::SlowDisk(_) | What::FullDisk => Place::All,
            What::KillArbiter => Place::Arbiter,
            _ => Place::Primary,
        };
        let to = place(&said.at, default)?;
        let is_wire = matches!(whats[0], What::Wire(_) | What::Cut { .. } | What::KillArbiter);
        if to == Place::Arbiter && !is_wire {
            bail!(
                "{} is for hosts of the guest; of the arbiter, its wire can be disturbed",
                said.kind
            );
        }
        if to == Place::All && whats[0].is_blow() {
            bail!("{} at all hosts leaves nobody; give at = \"primary\" or \"spare\"", said.kind);
        }
        let span = match (said.for_ms, whats[0].lasts(), whats[0].is_blow()) {
            (Some(span), true, _) => span.read()?,
            (Some(_), false, _) => bail!("{} does not last: take for_ms out", said.kind),
            (None, true, true) => (ms(20.0), ms(3000.0)),
            (None, true, false) => (ms(86_400_000.0), ms(86_400_000.0)),
            (None, false, _) => (Duration::ZERO, Duration::ZERO),
        };
        let when = match (said.at_s, said.every_s) {
            (Some(at), None) if at >= 0.0 => When::At(Duration::from_secs_f64(at)),
            (None, Some(every)) if every >= 0.05 => When::Every(Duration::from_secs_f64(every)),
            (None, None) if !whats[0].is_blow() => When::At(Duration::ZERO),
            _ => bail!("say when: either at_s = 3.5 (once) or every_s = 5.0 (again and again)"),
        };
        let fault = |(number, what): (usize, &What)| {
            let when = match when {
                When::At(at) => When::At(at + Duration::from_millis(10) * number as u32),
                every @ When::Every(_) => every,
            };
            Fault { what: *what, to, when, span }
        };
        Ok(whats.iter().enumerate().map(fault).collect())
    }
}

impl SpanText {
    fn read(self) -> Result<(Duration, Duration)> {
        let (least, most) = match self {
            SpanText::One(span) => (span, span),
            SpanText::Two([least, most]) => (least, most),
        };
        if !(0.0 < least && least <= most) {
            bail!("for_ms is a number of milliseconds, or [LEAST, MOST]");
        }
        Ok((ms(least), ms(most)))
    }
}

fn ms(count: f64) -> Duration {
    Duration::from_secs_f64(count / 1000.0)
}

fn place(word: &str) -> Result<Place> {
    let all = [Place::Primary, Place::Spare, Place::Either, Place::Arbiter, Place::All];
    let found = all.into_iter().find(|place| place.to_string() == word);
    found.with_context(|| {
        format!("no place {word:?}; there are primary, spare, either, arbiter, all")
    })
}

const KINDS: &str = "kill-host, kill-programs, kill-agent, kill-guest, kill-arbiter, kill-point, \
                     stop, freeze, cut, delay, loss, reorder, duplicate, corrupt, slow-disk, \
                     full-disk, memory";

/// What a fault does; all that it says has to mean something.
fn what(said: &FaultText, hosts: usize) -> Result<Vec<What>> {
    let kind = &*said.kind;
    let has = [
        ("to", said.to.is_some(), kind == "cut"),
        ("both", said.both.is_some(), kind == "cut"),
        ("point", said.point.is_some(), kind == "kill-point"),
        ("delay_ms", said.delay_ms.is_some(), matches!(kind, "delay" | "slow-disk")),
        ("jitter_ms", said.jitter_ms.is_some(), kind == "delay"),
        (
            "share",
            said.share.is_some(),
            ["loss", "reorder", "duplicate", "corrupt"].contains(&kind),
        ),
    ];
    if let Some((key, ..)) = has.iter().find(|(_, is_said, is_known)| *is_said && !is_known) {
        bail!("{key} means nothing for kind = {kind:?}: take it out");
    }
    let share = || {
        let share = said.share.filter(|share| *share > 0.0 && *share <= 1.0);
        share.with_context(|| format!("{kind} needs share, of 1.0, as in share = 0.01"))
    };
    let delay = || {
        let delay = said.delay_ms.filter(|delay| *delay > 0.0);
        delay.map(ms).with_context(|| format!("{kind} needs delay_ms, as in delay_ms = 20"))
    };
    let calm = Weather::default();
    Ok(vec![match kind {
        "kill-host" => What::KillHost,
        "kill-programs" => What::KillPrograms,
        "kill-agent" => What::KillAgent,
        "kill-guest" if said.at.as_deref().unwrap_or("primary") == "primary" => What::KillGuest,
        "kill-guest" => bail!("the guest runs at the primary: take at out"),
        "kill-arbiter" => What::KillArbiter,
        "kill-point" => return points(said, hosts),
        "stop" => What::Stop,
        "freeze" => What::Freeze,
        "cut" => {
            let to = said.to.as_deref().unwrap_or("spare");
            if said.at.as_deref().unwrap_or("primary") == to {
                bail!("a cut has two ends, as in at = \"primary\", to = \"spare\"");
            }
            What::Cut { to: place(to)?, both: said.both.unwrap_or(true) }
        }
        "delay" => {
            let jitter = ms(said.jitter_ms.unwrap_or(0.0).max(0.0));
            What::Wire(Weather { delay: delay()?, jitter, ..calm })
        }
        "loss" => What::Wire(Weather { loss: share()?, ..calm }),
        "reorder" => What::Wire(Weather { reorder: share()?, ..calm }),
        "duplicate" => What::Wire(Weather { duplicate: share()?, ..calm }),
        "corrupt" => What::Wire(Weather { corrupt: share()?, ..calm }),
        "slow-disk" => What::SlowDisk(delay()?),
        "full-disk" => What::FullDisk,
        "memory" => What::Memory,
        "clock-step" => bail!(
            "a clock cannot be stepped here: CLOCK_REALTIME is one for the whole machine, and the \
             clocks of a time namespace are set before anything runs in it (time_namespaces(7)). \
             Agents measure by CLOCK_MONOTONIC and CLOCK_BOOTTIME only; `cargo xtask simulate` has \
             hosts whose clocks run apart"
        ),
        "" => bail!("say what happens: kind is one of {KINDS}"),
        kind => bail!("no fault {kind:?}; there are {KINDS}"),
    }])
}

/// The points that are meant.
fn points(said: &FaultText, hosts: usize) -> Result<Vec<What>> {
    let names = || {
        let names: Vec<_> = KillPoint::ALL.iter().map(|point| point.name()).collect();
        names.join(", ")
    };
    let Some(wanted) = &said.point else { bail!("kill-point needs point: all, {}", names()) };
    let survivable = |point: &KillPoint| point.role() != Role::Takeover || hosts > 2;
    let meant = KillPoint::ALL.iter().filter(|point| wanted == "all" || wanted == point.name());
    let meant: Vec<_> = meant.copied().collect();
    if meant.is_empty() {
        bail!("no kill point {wanted:?}; there are all, {}", names());
    }
    if !meant.iter().all(survivable) {
        bail!("who dies in a takeover is the second host to die: hosts = 3 survive that");
    }
    Ok(meant.into_iter().map(What::KillPoint).collect())
}

/// A file that says this; what was drawn of its faults is written out.
pub fn write(scenario: &Scenario, comment: &str) -> String {
    let mut text = String::new();
    let mut put = |line: String| {
        // A String takes everything.
        let _ = writeln!(text, "{line}");
    };
    comment.lines().for_each(|line| put(format!("# {line}")));
    put(format!("name = {:?}", scenario.name));
    put(format!("programs = {:?}", scenario.programs));
    put(format!("hosts = {}", scenario.hosts));
    put(format!("guarantee = {:?}", scenario.guarantee));
    put(format!("path = {:?}", if scenario.is_direct { "direct" } else { "spare" }));
    put(format!("store = {}", scenario.stores));
    put(format!("epoch_ms = {}", scenario.epoch.as_millis()));
    put(format!("silence_ms = {}", scenario.silence.as_millis()));
    // TOML has signed numbers.
    put(format!("seed = {}", scenario.seed & (u64::MAX >> 1)));
    put(format!("duration_s = {:.3}", scenario.duration.as_secs_f64()));
    put("\n[load]".to_owned());
    let load = &scenario.load;
    put(format!("connections = {}\ncallers = {}", load.connections, load.callers));
    put(match load.pace {
        None => "pace = \"mixed\"".to_owned(),
        Some(Pace::PerSecond(rate)) => format!("pace = {rate}"),
        Some(Pace::Saturated) => "pace = \"saturated\"".to_owned(),
    });
    put("\n[invariants]".to_owned());
    let limits = &scenario.invariants;
    let counts = [
        ("resets", limits.resets),
        ("errors", limits.errors),
        ("lost", limits.lost),
        ("duplicates", limits.duplicates),
    ];
    for (name, most) in counts {
        let most = most.map_or("\"any\"".to_owned(), |most| most.to_string());
        put(format!("{name} = {most}"));
    }
    put(format!("wait_s = {:.3}", limits.wait.as_secs_f64()));
    put(format!("linearizable = {}", limits.linearizable));
    scenario.faults.iter().for_each(|fault| put(write_fault(fault)));
    text
}

fn write_fault(fault: &Fault) -> String {
    let mut text = format!("\n[[fault]]\nkind = {:?}\n", fault.what.kind());
    let mut put = |line: String| text.push_str(&(line + "\n"));
    let in_ms = |span: Duration| format!("{:.3}", span.as_secs_f64() * 1e3);
    if !matches!(fault.what, What::KillPoint(_)) {
        put(format!("at = \"{}\"", fault.to));
    }
    match fault.when {
        When::At(at) => put(format!("at_s = {:.3}", at.as_secs_f64())),
        When::Every(mean) => put(format!("every_s = {:.3}", mean.as_secs_f64())),
    }
    if fault.what.lasts() {
        let (least, most) = fault.span;
        put(format!("for_ms = [{}, {}]", in_ms(least), in_ms(most)));
    }
    match fault.what {
        What::Cut { to, both } => put(format!("to = \"{to}\"\nboth = {both}")),
        What::KillPoint(point) => put(format!("point = {:?}", point.name())),
        What::SlowDisk(late) => put(format!("delay_ms = {}", in_ms(late))),
        What::Wire(weather) => {
            if !weather.delay.is_zero() {
                let jitter = in_ms(weather.jitter);
                put(format!("delay_ms = {}\njitter_ms = {jitter}", in_ms(weather.delay)));
            }
            let shares = [weather.loss, weather.reorder, weather.duplicate, weather.corrupt];
            if let Some(share) = shares.into_iter().find(|share| *share > 0.0) {
                put(format!("share = {share}"));
            }
        }
        _ => {}
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "programs = [\"redis\"]\nduration_s = 10.0\n";

    fn error(text: &str) -> String {
        format!("{:#}", parse(text, "test").expect_err("is wrong"))
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        let cases = [
            ("[[fault]]\nkind = \"kil\"\nat_s = 1.0", "line 3: no fault \"kil\""),
            ("[[fault]]\nkind = \"loss\"\nshare = 3.0", "line 3: loss needs share"),
            ("[[fault]]\nkind = \"kill-host\"", "line 3: say when"),
            ("[[fault]]\nkind = \"stop\"\nshare = 0.5\nat_s = 1.0", "share means nothing"),
            ("[[fault]]\nkind = \"clock-step\"\nat_s = 1.0", "CLOCK_REALTIME"),
            ("[[fault]]\nkind = \"kill-point\"\npoint = \"all\"\nat_s = 0.0", "hosts = 3"),
            ("hosts = 1", "line 3: 2, 3 or 4 hosts"),
            ("colour = 1", "unknown field `colour`"),
            ("guarantee = \"none\"", "line 3: \"none\" is none of"),
            ("guarantee = \"timeline\"\n[invariants]\nlinearizable = true", "back in time"),
        ];
        for (text, wanted) in cases {
            let told = error(&format!("{GOOD}{text}"));
            assert!(told.contains(wanted), "{text:?}: {told}");
        }
        assert!(
            error("programs = [\"postgres\"]\nduration_s = 1.0").contains("line 1: no program")
        );
        assert!(error("programs = ").contains("line 1"));
    }

    #[test]
    fn all_points_are_walked_in_their_order() {
        let text = "hosts = 3\n[[fault]]\nkind = \"kill-point\"\npoint = \"all\"\nat_s = 0.0";
        let scenario = parse(&format!("{GOOD}{text}"), "test").expect("is good");
        let walked: Vec<_> = scenario.draw().iter().map(|strike| strike.what).collect();
        let all: Vec<_> = KillPoint::ALL.iter().map(|point| What::KillPoint(*point)).collect();
        assert_eq!(walked, all);
    }

    #[test]
    fn every_scenario_is_good_and_survives_being_written() {
        let dir = crate::tree::root().join("scenarios");
        let mut count = 0;
        for entry in std::fs::read_dir(dir).expect("scenarios/").flatten() {
            let scenario = read(&entry.path()).expect("a good scenario");
            assert!(!scenario.faults.is_empty(), "{}", scenario.name);
            let drawn = scenario.with(&scenario.draw());
            let again = parse(&write(&drawn, "a\nb"), "again").expect("as it was written");
            let kinds = |scenario: &Scenario| -> Vec<_> {
                scenario.draw().iter().map(|strike| strike.to_string()).collect()
            };
            assert_eq!(kinds(&again), kinds(&drawn));
            count += 1;
        }
        assert!(count >= 12, "{count}");
    }
}
