//! The scenes. Each is a claim; a panic refutes it.

use std::process::ExitCode;
use std::time::Duration;

use super::world::{Primary, Spare, next_line};

type Scene = fn();

const SCENES: &[(&str, Scene)] = &[("a_counting_program_counts_on", counts_on)];

pub fn names() -> impl Iterator<Item = &'static str> {
    SCENES.iter().map(|(name, _)| *name)
}

pub fn run(name: &str) -> ExitCode {
    match SCENES.iter().find(|(known, _)| *known == name) {
        Some((_, scene)) => {
            scene();
            ExitCode::SUCCESS
        }
        None => ExitCode::FAILURE,
    }
}

const COUNTER: &str = "
import time
i = 0
while True:
    i += 1
    print(i, flush=True)
    time.sleep(0.003)
";

fn counts_on() {
    let mut primary = Primary::start(&["python3", "-c", COUNTER]);
    primary.run_until("20");
    let first = primary.checkpoint();
    let mut spare = Spare::start(&first.0);
    spare.apply(first);
    primary.run_for(Duration::from_millis(50));
    spare.apply(primary.checkpoint());
    primary.run_for(Duration::from_millis(20));
    let last: u64 = primary.die().lines().last().expect("a line").parse().expect("a number");
    let mut taken = spare.take_over();
    let mut line =
        || -> u64 { next_line(&mut taken.guest, &mut taken.output).parse().expect("a number") };
    let begin = line();
    assert!(begin > 20 && begin <= last + 1, "goes on at {begin}, had printed {last}");
    for next in begin + 1..begin + 50 {
        assert_eq!(line(), next);
    }
}
