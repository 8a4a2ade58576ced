//! A scenario runs: hosts, clients, weather on a thread of its own, blows one after the other.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::blow::{self, Undo};
use super::weather::Forecast;
use super::{Scenario, Strike, What};
use crate::campaign::agents::Agents;
use crate::campaign::witness::Witnesses;
use crate::campaign::{Plan, crew_of, draw_pace};
use crate::clock::{Instant, millis};
use crate::dice::Dice;
use crate::fleet::{Fleet, Pace, Seen};
use crate::lab::LabError;
use crate::picture::timeline::{Span, Timeline};
use crate::programs::Program;
use crate::protected::HANG;

/// Before the first fault.
const CALM: Duration = Duration::from_millis(500);
/// How long a pace lasts where it changes.
const PACE_FOR: Duration = Duration::from_secs(3);
/// The disk of a host whose disk is to be slow or full.
const DISK_BYTES: u64 = 128 << 20;

/// A fault that was injected.
#[derive(Clone, Debug)]
pub struct Injection {
    /// What.
    pub strike: Strike,
    /// When it began.
    pub at: Instant,
    /// When it was taken back, or everything was well again.
    pub until: Instant,
    /// How often it was seen to do harm.
    pub count: u64,
    /// The same in words.
    pub proof: String,
    /// What clients have seen from it until all was well again; not told of weather.
    pub seen: Option<Seen>,
    /// From the fault, or its end, until every connection had had a reply.
    pub answered: Option<Duration>,
    /// From the fault until the guest was protected again.
    pub unprotected: Option<Duration>,
}

/// What a run has shown.
#[derive(Clone, Debug)]
pub struct Report {
    /// The scenario's name.
    pub name: String,
    /// The program's.
    pub program: &'static str,
    /// The scenario's.
    pub seed: u64,
    /// What was done, in order.
    pub injections: Vec<Injection>,
    /// What clients have seen in all.
    pub seen: Seen,
    /// Takeovers.
    pub takeovers: u64,
    /// Operations whose history was checked.
    pub operations: u64,
    /// What breaks an invariant, or is wrong besides.
    pub wrongs: Vec<String>,
    /// It proves nothing: two hosts were lost at once, as the arbiter's record shows.
    pub is_void: bool,
    /// How long it took.
    pub took: Duration,
    /// Logs and the picture.
    pub logs: PathBuf,
}

impl Report {
    /// True if all invariants have held.
    pub fn is_good(&self) -> bool {
        self.wrongs.is_empty()
    }
}

/// Runs a scenario with one of its programs and leaves logs and a picture in `logs`. An error is
/// one of the machine, not of what is tested.
pub fn run(
    scenario: &Scenario,
    program: Program,
    plan: &Plan,
    logs: &Path,
) -> Result<Report, LabError> {
    let plan = plan_of(scenario, plan);
    let begun = Instant::now();
    let mut agents = Agents::start(&program, &plan)?;
    let crew = crew_of(&program, &plan, &agents, scenario.seed);
    let fleet = Fleet::start(agents.lab.client(), crew);
    let late = |what: String| LabError::Deadline { what, waited: HANG };
    fleet.roll_call(HANG).map_err(|behind| late(format!("{behind} first replies")))?;
    let checks = scenario.invariants.linearizable && program.name == "redis-server";
    let witnesses = plan.checker.clone().filter(|_| checks).map(|checker| {
        let (client, service) = (agents.lab.client(), agents.service);
        Witnesses::start(client, service, checker, plan.patience, scenario.seed)
    });
    agents.protect().map_err(late)?;
    // What happened before is not of the scenario.
    fleet.take_seen();
    let mut run = Run {
        scenario,
        report: Report {
            name: scenario.name.clone(),
            program: program.name,
            seed: scenario.seed,
            injections: Vec::new(),
            seen: Seen::default(),
            takeovers: 0,
            operations: 0,
            wrongs: Vec::new(),
            is_void: false,
            took: Duration::ZERO,
            logs: logs.to_owned(),
        },
        witnesses,
        fleet,
        begin: Instant::now() + CALM,
        agents,
        paces: Paces { dice: Dice::new(scenario.seed).part(0), next: Instant::default() },
        patience: plan.patience,
        taken_over: BTreeSet::new(),
    };
    run.play();
    run.conclude();
    run.report.took = Instant::now().since(begun);
    run.leave_traces();
    Ok(run.report)
}

/// The campaign's plan with what the scenario says.
fn plan_of(scenario: &Scenario, plan: &Plan) -> Plan {
    let mut plan = plan.clone();
    let has = |wanted: fn(What) -> bool| scenario.faults.iter().any(|fault| wanted(fault.what));
    plan.hosts = scenario.hosts;
    plan.guarantee = scenario.guarantee;
    plan.wires = has(|what| matches!(what, What::Wire(_)));
    plan.disk_bytes = has(What::is_of_disks).then_some(DISK_BYTES);
    plan.is_strained =
        has(|what| what.is_of_disks() || matches!(what, What::Memory | What::KillPoint(_)));
    plan.epoch = scenario.epoch;
    plan.silence = Some(scenario.silence);
    plan.connections = scenario.load.connections;
    plan.callers = scenario.load.callers;
    plan.patience = scenario.invariants.wait;
    let mut words = Vec::new();
    if scenario.is_direct {
        words.extend(["--path", "direct"]);
    }
    if scenario.stores {
        words.extend(["--store", "file:///var/lib/hotspare/store"]);
        words.extend(["--store-every", "1s", "--keep", "3s", "--keep-last", "2"]);
    }
    plan.run_words = words.into_iter().map(str::to_owned).collect();
    plan
}

/// Clients ask now so, now so.
struct Paces {
    dice: Dice,
    next: Instant,
}

struct Run<'a> {
    scenario: &'a Scenario,
    report: Report,
    // In this order: clients end before their lab does.
    witnesses: Option<Witnesses>,
    fleet: Fleet,
    begin: Instant,
    agents: Agents,
    paces: Paces,
    patience: Duration,
    taken_over: BTreeSet<Instant>,
}

impl Run<'_> {
    fn play(&mut self) {
        let (blows, weather): (Vec<_>, Vec<_>) =
            self.scenario.draw().into_iter().partition(|strike| strike.what.is_blow());
        self.change_pace();
        self.fleet.probe(true);
        let hosts = self.agents.lab.hosts().to_vec();
        let forecast = Forecast::start(self.begin, weather, hosts);
        for strike in blows {
            self.wait_until(self.begin + strike.at);
            let seen = self.blow(&strike, &forecast);
            if let Err(wrong) = seen {
                self.report.wrongs.push(format!("{strike}: {wrong}"));
                break;
            }
            if !self.is_well() {
                break;
            }
        }
        if self.is_well() {
            self.wait_until(self.begin + self.scenario.duration);
        }
        let past = forecast.end();
        self.report.injections.extend(past);
        self.report.injections.sort_by_key(|injection| injection.at);
    }

    fn is_well(&self) -> bool {
        let seen = self.total();
        self.report.wrongs.is_empty() && broken(&self.scenario.invariants, &seen).is_empty()
    }

    fn total(&self) -> Seen {
        self.report.seen.clone()
    }

    /// Waits, and has clients change their pace meanwhile. Ends early if something is wrong.
    fn wait_until(&mut self, instant: Instant) {
        while Instant::now() < instant {
            let step = Instant::now() + Duration::from_millis(50);
            step.min(instant).sleep_until();
            self.change_pace();
        }
    }

    fn change_pace(&mut self) {
        let now = Instant::now();
        if now < self.paces.next {
            return;
        }
        self.paces.next = now + PACE_FOR;
        let pace = self.scenario.load.pace;
        let pace: Pace = pace.unwrap_or_else(|| draw_pace(&mut self.paces.dice, false));
        self.fleet.set_pace(pace);
        if let Some(witnesses) = &self.witnesses {
            witnesses.set_pace(pace);
        }
    }

    /// A blow, from a guest that is protected to one that is so again.
    fn blow(&mut self, strike: &Strike, forecast: &Forecast) -> Result<(), String> {
        let in_words = |error: LabError| error.to_string();
        self.protect(forecast)?;
        self.collect();
        let term = self.agents.term();
        let struck = blow::strike(strike, &mut self.agents).map_err(in_words)?;
        let mut injection = Injection {
            strike: *strike,
            at: struck.at,
            until: struck.at,
            count: u64::from(!struck.proof.is_empty()),
            proof: struck.proof,
            seen: None,
            answered: None,
            unprotected: None,
        };
        let suffered = self.suffer(strike, struck.undo, forecast, &mut injection);
        let now = Instant::now();
        injection.until = now;
        injection.unprotected = suffered.is_ok().then(|| now.since(injection.at));
        injection.seen = Some(self.collect());
        self.report.takeovers += self.agents.term().saturating_sub(term);
        self.taken_over.extend(self.agents.takeovers());
        self.report.injections.push(injection);
        if suffered.is_err() || !self.is_well() {
            self.report.is_void = self.agents.was_hit_alone(term);
        }
        suffered
    }

    fn suffer(
        &mut self,
        strike: &Strike,
        undo: Undo,
        forecast: &Forecast,
        injection: &mut Injection,
    ) -> Result<(), String> {
        if undo != Undo::Nothing {
            (injection.at + strike.span).sleep_until();
            let undone = blow::undo(undo, &mut self.agents);
            let proof = undone.map_err(|error| error.to_string())?;
            injection.count += u64::from(!proof.is_empty());
            injection.proof.push_str(&proof);
        }
        let over = Instant::now();
        self.all_go_on("after it")?;
        injection.answered = Some(Instant::now().since(over));
        self.protect(forecast)?;
        self.all_go_on("protected again")
    }

    fn protect(&mut self, forecast: &Forecast) -> Result<(), String> {
        self.agents.protect()?;
        if let Some(primary) = self.agents.primary() {
            forecast.sky.primary.store(primary, Ordering::Relaxed);
            let spare = self.agents.spare(primary).unwrap_or(1 - primary.min(1));
            forecast.sky.spare.store(spare, Ordering::Relaxed);
        }
        Ok(())
    }

    fn all_go_on(&self, when: &str) -> Result<(), String> {
        self.fleet
            .roll_call(self.patience + Duration::from_secs(2))
            .map_err(|behind| format!("{behind} connections have no reply, {when}"))
    }

    /// Adds what clients have seen since to the sum.
    fn collect(&mut self) -> Seen {
        let seen = self.fleet.take_seen();
        self.report.seen.add(&seen);
        seen
    }

    /// The end: no more weather, all go on, and what clients say of it.
    fn conclude(&mut self) {
        if self.is_well() {
            let ended = self.agents.protect().and_then(|()| self.all_go_on("at the end"));
            if let Err(wrong) = ended {
                self.report.wrongs.push(wrong);
                self.report.is_void = self.agents.was_hit_alone(self.agents.term());
            }
        }
        self.fleet.probe(false);
        self.collect();
        if let Some(mut witnesses) = self.witnesses.take() {
            let testimony = witnesses.testify(&self.report.logs.join("history"));
            self.report.operations = testimony.operations;
            testimony.resets.into_iter().for_each(|words| self.report.seen.reset(words));
            self.report.wrongs.extend(testimony.wrongs);
        }
        let broken = broken(&self.scenario.invariants, &self.report.seen);
        self.report.wrongs.extend(broken);
        // A fault that never did any harm would be a hole in the scenario.
        for number in 0..self.scenario.faults.len() {
            let injections = &self.report.injections;
            let own = injections.iter().filter(|injection| injection.strike.fault == number);
            let (count, harm) =
                own.fold((0, 0), |(count, harm), injection| (count + 1, harm + injection.count));
            if count > 0 && harm == 0 && self.report.wrongs.is_empty() {
                let fault = injections.iter().find(|one| one.strike.fault == number);
                let words = fault.map(|one| one.strike.to_string()).unwrap_or_default();
                self.report.wrongs.push(format!("{words}: it was never seen to do anything"));
            }
        }
    }

    fn leave_traces(&mut self) {
        let dir = self.report.logs.clone();
        let left = self.agents.keep_logs(&dir).and_then(|()| {
            fs::write(dir.join("report"), format!("{:#}\n", self.report))?;
            fs::write(dir.join("timeline.svg"), self.picture().svg())
        });
        if let Err(error) = left {
            self.report.wrongs.push(format!("logs cannot be kept: {error}"));
        }
    }

    fn picture(&self) -> Timeline {
        let span = |injection: &Injection| Span {
            from: injection.at,
            to: if injection.strike.what.lasts() {
                (injection.at + injection.strike.span).min(injection.until)
            } else {
                injection.at
            },
            well: injection.unprotected.map(|span| injection.at + span),
            words: injection.strike.to_string(),
            lane: injection.strike.fault,
        };
        let (good, report) = (self.report.is_good(), &self.report);
        Timeline {
            title: format!("{} with {}", report.name, report.program),
            subtitle: format!(
                "seed {}, {} faults, {} takeovers, {} replies: {}",
                report.seed,
                report.injections.len(),
                report.takeovers,
                report.seen.replies,
                if good { "all invariants held" } else { "FAILED" }
            ),
            begin: self.begin,
            faults: report.injections.iter().map(span).collect(),
            takeovers: self.taken_over.iter().copied().collect(),
            replies: self.fleet.track(),
        }
    }
}

fn broken(invariants: &super::Invariants, seen: &Seen) -> Vec<String> {
    let counts = [
        (seen.resets, invariants.resets, "connections broke"),
        (seen.errors, invariants.errors, "replies were wrong or late"),
        (seen.lost, invariants.lost, "acknowledged writes are gone"),
        (seen.duplicates, invariants.duplicates, "writes were done twice"),
    ];
    let broken = |(count, most, what): &(u64, Option<u64>, &str)| {
        let most = (*most).filter(|most| count > most)?;
        Some(format!("{count} {what}, {most} may"))
    };
    let mut words: Vec<String> = counts.iter().filter_map(broken).collect();
    if !words.is_empty() {
        words.extend(seen.words.iter().cloned());
    }
    words
}

impl fmt::Display for Report {
    /// With `#` each injection has a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match (self.is_good(), self.is_void) {
            (true, _) => "ok",
            (false, true) => "void",
            (false, false) => "FAILED",
        };
        let (seen, injections) = (&self.seen, self.injections.len());
        write!(
            f,
            "{:<20} {:<12} seed {:<20} {verdict:<6} {injections} faults, {} takeovers, silence \
             {:.0} ms, longest wait {:.0} ms, {} replies, {} operations checked, {:.0} s",
            self.name,
            self.program,
            self.seed,
            self.takeovers,
            millis(seen.silence),
            millis(seen.wait),
            seen.replies,
            self.operations,
            self.took.as_secs_f64()
        )?;
        let first = self.injections.first().map_or(Instant::default(), |first| first.at);
        let shown = if f.alternate() { injections } else { 0 };
        for injection in &self.injections[..shown] {
            let at = injection.at.since(first).as_secs_f64();
            write!(f, "\n    {at:>7.3} s  {} [{}]", injection.strike, injection.proof)?;
            if let Some(seen) = &injection.seen {
                let (silence, wait) = (millis(seen.silence), millis(seen.wait));
                write!(f, ": silence {silence:.0} ms, longest wait {wait:.0} ms")?;
            }
            if let Some(answered) = injection.answered {
                write!(f, ", all had a reply after {:.1} s", answered.as_secs_f64())?;
            }
            if let Some(unprotected) = injection.unprotected {
                write!(f, ", protected after {:.1} s", unprotected.as_secs_f64())?;
            }
        }
        if !seen.is_good() {
            let (resets, errors, lost, twice) =
                (seen.resets, seen.errors, seen.lost, seen.duplicates);
            write!(
                f,
                "\n    clients saw: {resets} connections broke, {errors} replies were wrong or \
                 late, {lost} writes are gone, {twice} were done twice"
            )?;
        }
        for slow in &seen.slow {
            write!(f, "\n    slow: {slow}")?;
        }
        for wrong in &self.wrongs {
            write!(f, "\n    wrong: {wrong}")?;
        }
        if f.alternate() || !self.is_good() {
            write!(f, "\n    logs: {}", self.logs.display())?;
        }
        Ok(())
    }
}
