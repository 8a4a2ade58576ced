module hotspare/examples

go 1.19
