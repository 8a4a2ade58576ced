//! Where labs are: on this machine, each host on processors of its own if there are enough, or
//! on real hosts.

use std::fmt;
use std::sync::OnceLock;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Chosen once for the whole program, before the first lab.
static CHOSEN: OnceLock<Ground> = OnceLock::new();

/// Where labs are.
#[derive(Clone, Debug)]
pub enum Ground {
    /// In namespaces of this machine.
    Here(Option<Pins>),
    /// Each host is one that `ssh` reaches.
    Real {
        /// As `ssh` takes them; the first has the guest.
        hosts: Vec<String>,
        /// The command with its options.
        ssh: Vec<String>,
    },
}

/// Says where all labs of this program are from now on. The first word counts; it is returned.
pub fn choose(ground: Ground) -> &'static Ground {
    CHOSEN.get_or_init(|| ground)
}

/// Where labs are, if somebody has chosen.
pub(super) fn chosen() -> Option<&'static Ground> {
    CHOSEN.get()
}

impl fmt::Display for Ground {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ground::Here(None) => to.write_str("all hosts on one machine, nothing pinned"),
            Ground::Here(Some(pins)) => write!(
                to,
                "all hosts on one machine, pinned to processors: client {}, guest {}, primary's \
                 agent {}, spare's {}",
                list(&pins.client),
                list(&pins.guest),
                list(&pins.primary),
                list(&pins.spare)
            ),
            Ground::Real { hosts, .. } => {
                write!(to, "over the hosts {}, clients on this machine", hosts.join(", "))
            }
        }
    }
}

/// Processors for each part of a lab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pins {
    client: Vec<usize>,
    guest: Vec<usize>,
    primary: Vec<usize>,
    spare: Vec<usize>,
}

impl Pins {
    /// An equal share for each part. Nothing with fewer than four processors: parts that share one
    /// are better left to the scheduler.
    pub fn of(processors: &[usize]) -> Option<Pins> {
        let share = processors.len() / 4;
        let mut shares = processors.chunks(share.max(1));
        let mut next = || shares.next().map(<[usize]>::to_vec);
        let (client, guest, primary, spare) = (next()?, next()?, next()?, next()?);
        (share > 0).then_some(Pins { client, guest, primary, spare })
    }

    /// From four lists such as `0,1,2-3,3`, one for each part. All must be among `processors`.
    pub fn parse(said: &str, processors: &[usize]) -> Result<Pins, String> {
        let part = |part: &str| -> Result<Vec<usize>, String> {
            let wrong = || format!("{part:?} is neither a processor nor a range, as 2 or 2-3");
            let number = |text: &str| text.parse::<usize>().map_err(|_| wrong());
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let all: Vec<usize> = (number(first)?..=number(last)?).collect();
            let missing = all.iter().find(|one| !processors.contains(one));
            match missing {
                Some(one) => Err(format!("there is no processor {one}; there are {processors:?}")),
                None if all.is_empty() => Err(wrong()),
                None => Ok(all),
            }
        };
        let parts = said.split(',').map(part).collect::<Result<Vec<_>, _>>()?;
        let [client, guest, primary, spare] = <[Vec<usize>; 4]>::try_from(parts)
            .map_err(|_| "four are wanted: CLIENT,GUEST,PRIMARY,SPARE".to_owned())?;
        Ok(Pins { client, guest, primary, spare })
    }

    /// Those of the host with this number, as [`Pin`]; hosts beyond the first two have none.
    pub(super) fn of_host(&self, name: &str) -> Option<Pin> {
        match name {
            "host0" => Some(Pin { agent: self.primary.clone(), programs: self.guest.clone() }),
            "host1" => Some(Pin { agent: self.spare.clone(), programs: self.spare.clone() }),
            "client" => Some(Pin { agent: self.client.clone(), programs: self.client.clone() }),
            _ => None,
        }
    }
}

/// The processors of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pin {
    /// Of `hotspare`.
    pub(super) agent: Vec<usize>,
    /// Of everything else.
    pub(super) programs: Vec<usize>,
}

/// Processors in a line.
pub(super) fn list(processors: &[usize]) -> String {
    processors.iter().map(ToString::to_string).collect::<Vec<_>>().join("+")
}

/// The processors that this program may use.
pub fn processors() -> nix::Result<Vec<usize>> {
    let set = sched_getaffinity(Pid::from_raw(0))?;
    Ok((0..CpuSet::count()).filter(|one| set.is_set(*one).unwrap_or(false)).collect())
}

/// The calling thread runs on these processors only, and so does whatever it starts, until this is
/// dropped.
pub(super) struct Pinned(CpuSet);

impl Pinned {
    pub(super) fn to(processors: &[usize]) -> nix::Result<Pinned> {
        let before = sched_getaffinity(Pid::from_raw(0))?;
        let mut set = CpuSet::new();
        processors.iter().try_for_each(|one| set.set(*one))?;
        sched_setaffinity(Pid::from_raw(0), &set)?;
        Ok(Pinned(before))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // It was allowed before.
        let _ = sched_setaffinity(Pid::from_raw(0), &self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_gets_an_equal_share_of_enough_processors() {
        assert_eq!(Pins::of(&[0, 1, 2]), None);
        let four = Pins::of(&[0, 2, 4, 6]).unwrap();
        assert_eq!((four.client, four.guest), (vec![0], vec![2]));
        assert_eq!((four.primary, four.spare), (vec![4], vec![6]));
        let many = Pins::of(&(0..11).collect::<Vec<_>>()).unwrap();
        assert_eq!((many.guest, many.spare), (vec![2, 3], vec![6, 7]));
    }

    #[test]
    fn processors_are_taken_as_told() {
        let pins = Pins::parse("0,1,0-1,1", &[0, 1]).unwrap();
        assert_eq!((pins.client, pins.primary), (vec![0], vec![0, 1]));
        for (said, wrong) in [
            ("0,1", "four are wanted"),
            ("0,1,2,0", "no processor 2"),
            ("0,x,0,0", "\"x\" is neither"),
            ("1-0,0,0,0", "\"1-0\" is neither"),
        ] {
            let error = Pins::parse(said, &[0, 1]).unwrap_err();
            assert!(error.contains(wrong), "{said}: {error}");
        }
    }

    #[test]
    fn what_a_pinned_thread_starts_is_pinned() {
        let here = processors().unwrap();
        let last = *here.last().unwrap();
        let pinned = Pinned::to(&[last]).unwrap();
        let said = std::process::Command::new("nproc").output().unwrap();
        assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), "1");
        drop(pinned);
        assert_eq!(processors().unwrap(), here);
    }
}
