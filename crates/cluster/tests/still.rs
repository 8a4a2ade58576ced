//! A primary whose host stood still: what nobody listened for is nobody's silence.

use hotspare_cluster::{Action, Beat, BeatRole, Config, Event, Node};
use hotspare_image::{Epoch, EventIndex, NodeId, Position, Term};

const MS: u64 = 1_000_000;
const SPARE: NodeId = NodeId(2);

/// A primary that has a spare with a whole ghost, and heard it just now.
fn protected(now: u64) -> Node {
    let mut node = Node::reigning(Config::new(NodeId(1)), now, Term(1), u64::MAX);
    let position = Position { epoch: Epoch(1), event: EventIndex(0) };
    let beat = Beat { from: SPARE, term: Term(1), role: BeatRole::SpareReady, position };
    node.step(now, Event::SpareJoined(SPARE));
    node.step(now, Event::SpareAcknowledged { node: SPARE, position });
    node.step(now, Event::Beat(beat));
    node
}

fn drops(actions: &[Action]) -> bool {
    actions.iter().any(|action| matches!(action, Action::DropSpare { node: SPARE, .. }))
}

#[test]
fn a_primary_that_stood_still_gives_its_spares_the_time_to_be_heard() {
    let mut node = protected(0);
    assert!(!drops(&node.step(60 * MS, Event::Tick)));
    // Nobody listened from 60 ms to 400 ms.
    assert!(!drops(&node.step(400 * MS, Event::StoodStill(340 * MS))));
    assert!(!drops(&node.step(400 * MS, Event::Tick)));
    assert!(!drops(&node.step(429 * MS, Event::Tick)));
    // By now it was silent for 60 ms before and for 30 ms since.
    assert!(drops(&node.step(430 * MS, Event::Tick)));
}

#[test]
fn a_spare_is_dropped_that_is_silent_while_its_primary_listens() {
    let mut node = protected(0);
    assert!(drops(&node.step(90 * MS, Event::Tick)));
}
