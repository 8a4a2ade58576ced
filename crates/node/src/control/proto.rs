//! What `build.rs` makes of `proto/hotspare/v1/control.proto`, and our words in it.
#![allow(missing_docs, reason = "the descriptions are in the .proto")]

tonic::include_proto!("hotspare.v1");

impl From<&crate::history::Record> for Record {
    fn from(record: &crate::history::Record) -> Self {
        Self {
            wall_ms: record.wall_ms,
            monotonic_ns: record.monotonic_ns,
            boot: record.boot.clone(),
            host: record.host.clone(),
            node: record.node.clone(),
            pid: record.pid,
            guest: record.guest.clone(),
            term: record.term,
            epoch: record.epoch,
            event: record.event(),
            words: record.words(),
            json: record.to_line(),
        }
    }
}

impl From<crate::report::Happening> for Event {
    fn from(happening: crate::report::Happening) -> Self {
        use crate::report::News;
        let what = match happening.news {
            News::Note(weight, text) => event::What::Note(Note { priority: weight as u32, text }),
            News::Record(record) => event::What::Record(Record::from(&*record)),
            News::Epoch(line) => event::What::Epoch(Epoch {
                epoch: line.epoch,
                pause_us: line.parts.total.as_secs_f64() * 1e6,
                pages: line.pages,
                bytes: line.bytes,
                lag: line.lag,
            }),
        };
        Event { wall_ms: happening.wall_ms, what: Some(what) }
    }
}
