//! Looks for the smallest scenario that still fails: ddmin (Zeller, Hildebrandt: Simplifying and
//! Isolating Failure-Inducing Input, 2002) over the faults that were drawn, then shorter ones.
//!
//! A machine with a clock does not repeat itself, so each candidate gets several tries, and what
//! is found is a scenario that has failed, not a proof that no smaller one does.

use std::time::Duration;

use super::{Scenario, Strike};

/// The faults that are left, and how they came to be so few.
#[derive(Clone, Debug)]
pub struct Minimal {
    /// It has failed.
    pub scenario: Scenario,
    /// Its faults.
    pub strikes: Vec<Strike>,
    /// Candidates that were tried.
    pub tried: usize,
}

/// Minimises `scenario`, which has failed. `fails` runs a candidate and tells whether it does too;
/// nothing if there is no more time.
pub fn minimise(scenario: &Scenario, fails: &mut impl FnMut(&Scenario) -> Option<bool>) -> Minimal {
    let mut best = Minimal { scenario: scenario.clone(), strikes: scenario.draw(), tried: 0 };
    best.scenario = trimmed(scenario, &best.strikes);
    let done = drop_faults(&mut best, scenario, fails).and_then(|()| shorten(&mut best, fails));
    // Without time for more, what was found so far is the answer.
    let _ = done;
    best
}

/// With exactly these faults, ending soon after the last.
fn trimmed(scenario: &Scenario, strikes: &[Strike]) -> Scenario {
    let end = strikes.iter().map(|strike| strike.at + strike.span).max().unwrap_or_default();
    let duration = (end + Duration::from_secs(1)).min(scenario.duration);
    Scenario { duration, ..scenario.with(strikes) }
}

/// Takes away as many faults as can be.
fn drop_faults(
    best: &mut Minimal,
    scenario: &Scenario,
    fails: &mut impl FnMut(&Scenario) -> Option<bool>,
) -> Option<()> {
    let mut parts = 2;
    while best.strikes.len() > 1 {
        let size = best.strikes.len().div_ceil(parts);
        let mut is_smaller = false;
        for part in 0..best.strikes.len().div_ceil(size) {
            let range = part * size..((part + 1) * size).min(best.strikes.len());
            let mut rest = best.strikes.clone();
            rest.drain(range);
            if attempt(best, scenario, rest, fails)? {
                is_smaller = true;
                break;
            }
        }
        if is_smaller {
            parts = (parts - 1).max(2);
        } else if size == 1 {
            break;
        } else {
            parts = (parts * 2).min(best.strikes.len());
        }
    }
    Some(())
}

/// Lets what is left begin at once, last less long, and with fewer clients.
fn shorten(best: &mut Minimal, fails: &mut impl FnMut(&Scenario) -> Option<bool>) -> Option<()> {
    let first = best.strikes.iter().map(|strike| strike.at).min().unwrap_or_default();
    let at_once = |strike: &Strike| Strike { at: strike.at - first, ..*strike };
    let earlier: Vec<Strike> = best.strikes.iter().map(at_once).collect();
    if !first.is_zero() {
        let scenario = best.scenario.clone();
        attempt(best, &scenario, earlier, fails)?;
    }
    for index in 0..best.strikes.len() {
        while best.strikes[index].what.lasts() && best.strikes[index].span.as_millis() > 40 {
            let mut shorter = best.strikes.clone();
            shorter[index].span /= 2;
            let scenario = best.scenario.clone();
            if !attempt(best, &scenario, shorter, fails)? {
                break;
            }
        }
    }
    while best.scenario.load.connections > 1 {
        let mut fewer = best.scenario.clone();
        fewer.load.connections /= 2;
        let strikes = best.strikes.clone();
        if !attempt(best, &fewer, strikes, fails)? {
            break;
        }
    }
    Some(())
}

/// Takes a candidate over if it fails as well.
fn attempt(
    best: &mut Minimal,
    scenario: &Scenario,
    strikes: Vec<Strike>,
    fails: &mut impl FnMut(&Scenario) -> Option<bool>,
) -> Option<bool> {
    let candidate = trimmed(scenario, &strikes);
    best.tried += 1;
    let has_failed = fails(&candidate)?;
    if has_failed {
        (best.scenario, best.strikes) = (candidate, strikes);
    }
    Some(has_failed)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{scenario, stops};
    use super::super::{Fault, Place, What, When};
    use super::*;

    #[test]
    fn one_fault_of_many_is_found_and_shortened() {
        let kill = Fault {
            what: What::KillHost,
            to: Place::Primary,
            when: When::At(Duration::from_secs(60)),
            span: (Duration::ZERO, Duration::ZERO),
        };
        let all = scenario(vec![stops(When::Every(Duration::from_secs(2))), kill]);
        let has_kill = |scenario: &Scenario| {
            scenario.draw().iter().any(|strike| strike.what == What::KillHost)
        };
        let minimal = minimise(&all, &mut |candidate| Some(has_kill(candidate)));
        assert_eq!(minimal.strikes.len(), 1);
        assert_eq!(minimal.strikes[0].what, What::KillHost);
        assert_eq!(minimal.strikes[0].at, Duration::ZERO);
        assert!(minimal.scenario.duration <= Duration::from_secs(1));
        assert_eq!(minimal.scenario.load.connections, 1);
        assert!(minimal.tried < 60, "{}", minimal.tried);
    }

    #[test]
    fn two_faults_that_only_fail_together_stay() {
        let all = scenario(vec![stops(When::Every(Duration::from_secs(3)))]);
        let strikes = all.draw();
        let (one, other) = (strikes[3].span, strikes[strikes.len() - 2].span);
        let fails = |candidate: &Scenario| {
            let spans: Vec<_> = candidate.draw().iter().map(|strike| strike.span).collect();
            spans.contains(&one) && spans.contains(&other)
        };
        let minimal = minimise(&all, &mut |candidate| Some(fails(candidate)));
        assert_eq!(minimal.strikes.len(), 2);
    }

    #[test]
    fn without_time_the_answer_is_what_has_failed() {
        let all = scenario(vec![stops(When::Every(Duration::from_secs(3)))]);
        let minimal = minimise(&all, &mut |_| None);
        assert_eq!(minimal.strikes, all.draw());
    }
}
