module hotspare.example

go 1.19
